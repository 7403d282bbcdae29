"""Records every step of an engine and shows it as a table or a page."""
