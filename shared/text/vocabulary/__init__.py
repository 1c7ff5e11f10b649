"""Vocabularies in other files than a ``tokenizer.json``, as the JSON of one."""
