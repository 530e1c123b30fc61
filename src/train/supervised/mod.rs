//! The supervised start of the demo policy: tasks, transcripts, model folder and the short training.

pub mod families;
pub mod task_folder;
pub mod transcripts;
pub mod words;
