//! Messages (`tracing`): warnings to the terminal, everything from `info` up to a file of the attempt.
//! Secrets are removed on the way.
//!
//! `LEGORL_LOG` changes the level of the file, in the usual form (`debug`, `legorl::serve=trace`).

use super::{progress, redact::Redactor};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};
use tracing_subscriber::{
    filter::LevelFilter, fmt, fmt::MakeWriter, layer::SubscriberExt, util::SubscriberInitExt, EnvFilter,
    Layer,
};

/// Why messages cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum LoggingError {
    /// The file cannot be opened.
    #[error("{path}: {source}")]
    Io {
        /// File.
        path: String,
        /// Operating system's error.
        #[source]
        source: io::Error,
    },
    /// `LEGORL_LOG` cannot be read.
    #[error("LEGORL_LOG: {0}")]
    Filter(String),
    /// Something else in this process takes the messages already.
    #[error("messages already go somewhere: {0}")]
    Taken(String),
}

/// Starts writing messages of this process: `rank-<rank>.log` in `folder`, warnings to standard error
/// on rank 0. Returns the file.
pub fn start(folder: &Path, rank: u32, redactor: Arc<Redactor>) -> Result<PathBuf, LoggingError> {
    let path = folder.join(format!("rank-{rank}.log"));
    let at = |source| LoggingError::Io {
        path: path.display().to_string(),
        source,
    };
    fs::create_dir_all(folder).map_err(at)?;
    let file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&path)
        .map_err(at)?;
    let wanted = std::env::var("LEGORL_LOG").unwrap_or_default();
    let filter = if wanted.is_empty() { "info" } else { &wanted };
    let filter = EnvFilter::try_new(filter).map_err(|error| LoggingError::Filter(error.to_string()))?;
    let to_file = fmt::layer()
        .with_ansi(false)
        .with_writer(Clean::new(
            Target::File(Arc::new(Mutex::new(file))),
            redactor.clone(),
        ))
        .with_filter(filter);
    let to_terminal = (rank == 0).then(|| {
        fmt::layer()
            .with_ansi(false)
            .with_target(false)
            .without_time()
            .with_writer(Clean::new(Target::Terminal, redactor))
            .with_filter(LevelFilter::WARN)
    });
    tracing_subscriber::registry()
        .with(to_file)
        .with(to_terminal)
        .try_init()
        .map_err(|error| LoggingError::Taken(error.to_string()))?;
    Ok(path)
}

#[derive(Clone)]
enum Target {
    File(Arc<Mutex<File>>),
    Terminal,
}

/// A writer that takes whole messages, removes secrets and passes them on.
#[derive(Clone)]
struct Clean {
    target: Target,
    redactor: Arc<Redactor>,
}

impl Clean {
    fn new(target: Target, redactor: Arc<Redactor>) -> Self {
        Self { target, redactor }
    }
}

impl<'a> MakeWriter<'a> for Clean {
    type Writer = Clean;

    fn make_writer(&'a self) -> Clean {
        self.clone()
    }
}

impl Write for Clean {
    /// `tracing_subscriber` writes a message with one call.
    fn write(&mut self, message: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(message);
        let cleaned = self.redactor.clean(&text);
        match &self.target {
            Target::File(file) => {
                file.lock()
                    .unwrap_or_else(|poisoned| poisoned.into_inner())
                    .write_all(cleaned.as_bytes())?;
            }
            Target::Terminal => progress::above_bars(|| io::stderr().write_all(cleaned.as_bytes()))?,
        }
        Ok(message.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_reach_the_file_without_secrets() {
        let folder = tempfile::tempdir().unwrap();
        let redactor = Arc::new(Redactor::default());
        redactor.add("topsecretvalue");
        let file = Arc::new(Mutex::new(File::create(folder.path().join("x.log")).unwrap()));
        let layer = fmt::layer()
            .with_ansi(false)
            .with_writer(Clean::new(Target::File(file), redactor));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            tracing::info!("the key is topsecretvalue");
        });
        let text = fs::read_to_string(folder.path().join("x.log")).unwrap();
        assert!(text.contains("the key is <redacted>"), "{text}");
    }
}
