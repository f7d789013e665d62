"""Ranks agree, or all are told. Each rank logs its calls; when one waits for long, a watchdog compares the logs.

collective_log.py  CollectiveLog: what a rank said to the others, in order, and the hash of it
board.py           NoticeBoard: records that ranks publish through the store, and the socket that wakes a rank
status.py          what a rank says of itself: a position of 16 bytes, and the same in words
local_state.py     where this rank is: its logs, and what its threads wait for
turns.py           when a rank may ask the store
records.py         what this rank publishes of itself, and what the others did
notices.py         what ranks post to all: questions, verdicts
diagnosis.py       why there is no use in waiting
verdicts.py        the sentences in which ranks are told
closing.py         logs that are closed: answering ranks that still wait
watchdog.py        Watchdog: looks ten times a second whether somebody waits for long
signals.py         SIGUSR1, by which somebody asks where the ranks are
process.py         the watchdog of a process: made, and ended
"""
