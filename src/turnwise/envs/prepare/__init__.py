"""Public data sets, from the files as published to the folder that a world reads.

folder.py       what is read and written, with checksums; all of it or nothing
questions.py    gsm8k, nq, hotpotqa
databases.py    spider, bird, chinook
repositories.py swe
registry.py     their names, and `prepare_data`
"""
