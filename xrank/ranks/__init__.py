"""One group of ranks: they meet, agree, fail, and exchange bytes through the memory of a host or over sockets.

Live gathers, shared conversions, refit and gradients use it; no other package waits for a rank.

    store, registration       ranks find each other by the store of a process group or of a launcher
    meeting, wire             they become a `RankGroup` (group), on one host by a `HostWire`, else by a `StoreWire`
    waits                     why a rank does not come: its end, its failure, or ranks that wait for each other
    exchange, gathering       one gather: the values of all ranks on the first; a failure ends it on all of them
    memory_messages, directory_messages, byte_service   large values on their way, each a `MessageWorkspace`
    team                      ranks that share one piece of work: `agree`, `broadcast`, `collect`
    memory, loans             bytes of tensors, read by range, also in the memory of other processes
"""
