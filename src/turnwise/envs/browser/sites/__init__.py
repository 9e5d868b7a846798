"""Web sites of our own, each with a database, seeded content, tasks, and checks of its final state."""
