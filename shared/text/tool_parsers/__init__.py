"""Tool calls in the text of a choice: a parser for each format in which models write them."""
