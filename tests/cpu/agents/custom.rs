//! The adapter for agents of one's own: an agent of a few lines of shell, in a runtime folder.
