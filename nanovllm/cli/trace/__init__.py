"""Records every step of an engine and shows it as a table, a page or a Chrome trace."""
