"""Detection of diverged, failed and missing ranks. A watchdog compares the collective logs of ranks that wait.

collective_log.py  CollectiveLog: the collectives of a rank in order, and their hash
state.py           the logs of this rank and the waits of its threads; a published position (16 bytes) and status (words)
store.py           records that ranks publish through the store of the process group, wake-ups, and limits of their rate
neighbors.py       processes of other ranks on this machine, to find that one is gone
notices.py         messages to all ranks: requests and verdicts; and how the waits of a closed log end
diagnosis.py       why a collective will never complete, and the error texts
watchdog.py        the thread that checks ten times a second whether this rank waits long; SIGUSR1; the end of the program
"""
