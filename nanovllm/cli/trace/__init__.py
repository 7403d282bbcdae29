"""Records every step of an engine and shows it as a table or a page.

trace   Trace, an observer that records events
events  the events, and the state after some of them
show    the table, and the data of the page
page    page.html, the page without its data
"""
