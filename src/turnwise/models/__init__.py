"""What is known of a model before it is loaded: where it lies, which family it is, how large its parts are."""

import sys
import warnings

if "IPython" in sys.modules:
    # transformers and huggingface_hub load tqdm, which warns in a notebook without widgets. We show our own progress.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tqdm.auto  # noqa: F401
