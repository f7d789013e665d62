"""Ranks agree, or all are told. Each rank logs its calls; when one waits for long, a watchdog compares the logs.

collective_log.py  CollectiveLog: what a rank said to the others, in order, and the hash of it
board.py           NoticeBoard: records that ranks publish through the store, and the socket that wakes a rank
watchdog.py        Watchdog: asks where the others are when a wait is long, ends waits in vain
"""
