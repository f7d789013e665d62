"""Detection of diverged, failed and missing ranks. A watchdog compares the collective logs of ranks that wait.

collective_log.py  CollectiveLog: the collectives of a rank in order, and their hash
state.py           the state that a rank publishes of a log, and the waits of its threads
store.py           records and notices in the store of the process group
verdict.py         why a collective will never complete, and the error texts
watchdog.py        the thread that checks ten times a second whether this rank waits long; positions()
"""
