"""What is known of a model before it is loaded: where it lies, which family it is, how large its parts are."""
