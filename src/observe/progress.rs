//! Progress on the terminal: bars where standard error is one, plain lines elsewhere.
//!
//! Bars show the steps of the run and what the current stage has done; a plain log gets one line a
//! step, and one line now and then while a stage takes long. `NO_COLOR` needs no care: there is none.

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::{
    io::{self, IsTerminal, Write},
    sync::{Mutex, OnceLock},
    time::{Duration, Instant},
};

/// Time between two plain lines of a stage.
const PLAIN_INTERVAL: Duration = Duration::from_secs(30);

/// The bars of this process, so that messages can be written above them.
static BARS: OnceLock<MultiProgress> = OnceLock::new();

/// Runs `write` while no bar is drawn.
pub(crate) fn above_bars<T>(write: impl FnOnce() -> T) -> T {
    match BARS.get() {
        Some(bars) => bars.suspend(write),
        None => write(),
    }
}

/// Progress of one run. Cheap to call from any thread.
#[derive(Debug)]
pub struct Progress {
    view: View,
    total_steps: u64,
}

#[derive(Debug)]
enum View {
    Bars { steps: ProgressBar, stage: ProgressBar },
    Plain(Mutex<PlainStage>),
    Hidden,
}

#[derive(Debug)]
struct PlainStage {
    name: String,
    total: u64,
    done: u64,
    shown: Instant,
}

impl Progress {
    /// Bars on a terminal, plain lines otherwise. `done_steps` were done by earlier
    /// attempts. A job without steps has a `total_steps` of 0 and shows its stage alone.
    pub fn new(total_steps: u64, done_steps: u64) -> Self {
        let view = if io::stderr().is_terminal() {
            let bars = BARS.get_or_init(MultiProgress::new);
            let steps = bars.add(ProgressBar::new(total_steps).with_position(done_steps));
            steps.set_style(style(
                "{prefix:>12} {bar:32} {pos}/{len}  {elapsed_precise}  {msg}",
            ));
            steps.set_prefix("step");
            let stage = bars.add(ProgressBar::new(0));
            stage.set_style(style("{prefix:>12} {bar:32} {pos}/{len}  {msg}"));
            steps.enable_steady_tick(Duration::from_millis(500));
            View::Bars { steps, stage }
        } else {
            View::Plain(Mutex::new(PlainStage {
                name: String::new(),
                total: 0,
                done: 0,
                shown: Instant::now(),
            }))
        };
        Self { view, total_steps }
    }

    /// For ranks that do not print.
    pub fn hidden() -> Self {
        Self {
            view: View::Hidden,
            total_steps: 0,
        }
    }

    /// A stage begins: `total` things (trials, tokens) are to be done. 0 where nobody knows.
    pub fn stage(&self, name: &str, total: u64) {
        match &self.view {
            View::Bars { stage, .. } => {
                stage.set_prefix(name.to_owned());
                stage.set_length(total);
                stage.set_position(0);
                stage.set_message("");
            }
            View::Plain(state) => {
                *lock(state) = PlainStage {
                    name: name.to_owned(),
                    total,
                    done: 0,
                    shown: Instant::now(),
                };
            }
            View::Hidden => {}
        }
    }

    /// `count` more things of the stage are done.
    pub fn advance(&self, count: u64, message: &str) {
        match &self.view {
            View::Bars { stage, .. } => {
                stage.set_message(message.to_owned());
                stage.inc(count);
            }
            View::Plain(state) => {
                let line = lock(state).advance(count, message, Instant::now());
                if let Some(line) = line {
                    plain(&line);
                }
            }
            View::Hidden => {}
        }
    }

    /// A step is done; `line` says what came of it.
    pub fn step_done(&self, step: u64, line: &str) {
        match &self.view {
            View::Bars { steps, stage } => {
                steps.set_position(step);
                steps.set_message(line.to_owned());
                stage.set_position(0);
            }
            View::Plain(_) => plain(&format!("step {step}/{}  {line}", self.total_steps)),
            View::Hidden => {}
        }
    }

    /// A line for the user, above the bars.
    pub fn note(&self, text: &str) {
        match &self.view {
            View::Bars { .. } => above_bars(|| plain(text)),
            View::Plain(_) => plain(text),
            View::Hidden => {}
        }
    }

    /// Removes the bars; the summary follows.
    pub fn finish(&self) {
        if let View::Bars { steps, stage } = &self.view {
            stage.finish_and_clear();
            steps.finish_and_clear();
        }
    }
}

impl PlainStage {
    /// Counts, and gives a line when the last one is long ago.
    fn advance(&mut self, count: u64, message: &str, now: Instant) -> Option<String> {
        self.done += count;
        if now.duration_since(self.shown) < PLAIN_INTERVAL {
            return None;
        }
        self.shown = now;
        let of = if self.total > 0 {
            format!("/{}", self.total)
        } else {
            String::new()
        };
        Some(
            format!("  {} {}{of}  {message}", self.name, self.done)
                .trim_end()
                .to_owned(),
        )
    }
}

fn lock(state: &Mutex<PlainStage>) -> std::sync::MutexGuard<'_, PlainStage> {
    state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("█▌░")
}

/// A reader that went away is no reason to stop a run.
fn plain(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_templates_are_valid() {
        for template in [
            "{prefix:>12} {bar:32} {pos}/{len}  {elapsed_precise}  {msg}",
            "{prefix:>12} {bar:32} {pos}/{len}  {msg}",
        ] {
            assert!(ProgressStyle::with_template(template).is_ok(), "{template}");
        }
    }

    #[test]
    fn a_long_stage_gives_a_line_now_and_then() {
        let start = Instant::now();
        let mut stage = PlainStage {
            name: "rollout".into(),
            total: 64,
            done: 0,
            shown: start,
        };
        assert_eq!(stage.advance(1, "", start + Duration::from_secs(5)), None);
        let line = stage.advance(2, "reward 0.5", start + Duration::from_secs(31));
        assert_eq!(line.as_deref(), Some("  rollout 3/64  reward 0.5"));
        assert_eq!(
            stage.advance(1, "", start + Duration::from_secs(40)),
            None,
            "counted from the last line"
        );
    }
}
