"""The hub: one process per job that puts together what ranks send, keeps it for a while and shows it to viewers."""
