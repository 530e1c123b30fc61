//! What a run tells about itself: files first, then the terminal. No user interface, no network.
//!
//! ```text
//! RUN_DIR/journal.jsonl             every event of the run, over all attempts          journal
//! LOG_DIR/<exp>.log, <exp>.jsonl    one line a step, verl's names                      metrics
//! LOG_DIR/<exp>/attempt-…/          messages of each rank in this attempt              attempt, logging
//! terminal                          bars or plain lines; at the end a table            progress, summary
//! ```
//!
//! Invariant: nothing here stops a run. A file that cannot be written is reported once and counted.

pub mod attempt;
pub mod journal;
pub mod logging;
pub mod memory;
pub mod metrics;
pub mod progress;
pub mod redact;
pub mod summary;

pub use attempt::Attempt;
pub use journal::Journal;
pub use metrics::{MetricsFiles, Row};
pub use progress::Progress;
pub use redact::Redactor;
