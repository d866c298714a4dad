"""Tools that look at a run from outside: only the command line and examples import them."""
