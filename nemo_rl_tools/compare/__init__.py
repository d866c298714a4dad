"""Two folders of records against each other: what differs, where first, and by how much."""
