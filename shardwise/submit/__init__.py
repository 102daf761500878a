"""Submitting a training command to a scheduler, one file per scheduler.

The file that a scheduler takes is written as a person would write it by hand, with comments that say why each
line is there. It can be read, changed and submitted without shardwise. What a site needs in every file
(partition, account, modules) is in the user's profile (profile.py).
"""
