"""Breaking model files on purpose: every reader refuses a mutant with a typed error or reads it.

`mutations` changes files with knowledge of their structure, `seeds` and `hf_seeds` make small sound
ones, `readers` says what is opened and how, `oracle` judges one mutant, `campaign` runs many of
them in worker processes.
"""
