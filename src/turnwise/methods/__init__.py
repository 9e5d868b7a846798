"""One small file per method: which groups it keeps, what each turn deserves, and the loss that uses it.

Each file is complete: methods repeat imports and the call that builds them, so that you can copy one file and change
it.
"""
