"""`nemo-rl view`: one page about several runs, served on loopback or written as a folder of files."""
