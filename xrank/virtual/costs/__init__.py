"""What a run will cost, told without one: bytes and flops of programs, and seconds over links."""
