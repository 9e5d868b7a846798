"""A local web page over run directories, live while they train: `turnwise view`.

`runs`, `one_run`, `attempts` and `one_attempt` read run directories and give plain dicts; `app` serves them and the
page in `static/`; `export` writes the same page and the same dicts into one file. Runs are opened for reading only.
"""
