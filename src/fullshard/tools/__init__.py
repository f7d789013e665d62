"""Programs around training.

install.py  install(): fullshard in place of torch's FSDP2
verify.py   verify(): sharded against plain, the first thing that differs
loading.py  what a command line names, and one line for what that raises
"""
