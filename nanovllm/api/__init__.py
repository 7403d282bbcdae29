"""What a caller gives and gets, and the checks of both."""
