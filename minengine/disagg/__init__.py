"""Prefill and decode apart: worker processes, what moves between them, and who gets which request.

What goes wrong, when it is noticed, and what the caller gets. "Goes on" is: on another worker, or on the same one once it is there again, with the
tokens that were given so far, none lost and none twice; "computed": by the decoder itself, which costs the time of a prefill.

    a worker's process ends                      at once (its pipe closes)               goes on; an error after the third worker that it took along
    one of its ranks ends                        at once                                 its worker ends with it
    a rank stands still                          60 s, in a step                         its worker ends
    a rank cannot read its share of the rows     at once, or kv_transfer_timeout_s       computed by all ranks; the blocks wait until each has answered
    a worker stands still                        worker_timeout_s, 5 s                   goes on; what it says when it moves again is stale
    ... for a minute more                        then it is killed                       and started again
    a read or a write does not end               kv_transfer_timeout_s, 10 s             computed; its blocks stay out of use until the other side moves or has ended
    nobody writes what was to be pushed          kv_lease_s, 30 s                        computed
    rows are not fetched                         kv_lease_s, 30 s; renewed 9 times       computed by the decoder that comes later; their blocks are free by then
      while their decoder is full                by the front, 2 minutes in all
    1,024 leases are taken                       at once                                 computed
    the client leaves                            at once                                 blocks come back, those that a read is under way into when it has ended
    no worker that decodes can be started        after 5 starts in a row                 EngineDead
    the front's process ends                     at once (the kernel ends its workers; on other nodes, the end of their connection)

On several nodes:

    a node goes                                  at once, or after half a minute if      goes on; its workers are started again where there is room, or are gone after
                                                 nothing says so                         5 tries
    a worker finds no room                       after a minute                          an error at the start; later, as a process that ended
"""
