"""Memory of a live model that ranks lend each other, and the reading of it.

Exports and loads of live models use it; live gathers of tensors use `xrank.workspace`. `peer_source` has the two ways
to read: process_vm_readv and sockets.
"""
