"""What looks at a run from outside: only the command line and examples import it."""
