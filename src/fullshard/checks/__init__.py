"""Detection of diverged, failed and missing ranks. A watchdog compares the collective logs of ranks that wait.

collective_log.py  CollectiveLog: the collectives of a rank in order, and their hash
board.py           StateStore: records and notices that ranks publish through the store, and the socket that wakes a rank
status.py          the published state of a rank: a position of 16 bytes, and a status in words
local_state.py     LocalState: the logs of this rank, and the waits of its threads
turns.py           RateLimiter: when a rank may send a request to the store
records.py         Records: what this rank published about itself, and what the other ranks published
notices.py         Notices: messages to all ranks, i.e. requests for positions or calls, and verdicts
diagnosis.py       Diagnosis: why a collective will never complete
verdicts.py        the error texts
closing.py         ClosedLogs: completes the pending messages of other ranks with dummy data
watchdog.py        Watchdog: checks ten times a second whether a thread waits long
signals.py         SIGUSR1, which requests a report of the state of all ranks
process.py         creates and ends the watchdog of a process
"""
