//! Errors and warnings of configuration, each with its place.

use std::{fmt, io, path::PathBuf, sync::Arc};

/// A place in a configuration file. Lines and columns count from 1; columns count characters.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Location {
    /// File as the user named it, or as it was found.
    pub file: Arc<PathBuf>,
    /// Line.
    pub line: u32,
    /// Column.
    pub column: u32,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file.display(), self.line, self.column)
    }
}

/// A construct that is not understood, or an expansion that cannot be done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{location}: {problem}\n  {help}")]
pub struct LanguageError {
    /// Where.
    pub location: Location,
    /// What is wrong.
    pub problem: String,
    /// What to write instead.
    pub help: String,
}

/// A value that does not fit its variable, or a required variable without one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValueProblem {
    /// Variable.
    pub name: String,
    /// Where the value comes from; `None` for a missing one.
    pub origin: Option<String>,
    /// What is wrong and what fits.
    pub problem: String,
}

impl fmt::Display for ValueProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            Some(origin) => write!(f, "{origin}: {} {}", self.name, self.problem),
            None => write!(f, "{} {}", self.name, self.problem),
        }
    }
}

/// Why a run configuration could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The path names no file.
    #[error(
        "config not found: `{given}`\n  looked for {tried}; a relative path counts from the working directory \
         {cwd}{}",
        near.as_ref().map_or(String::new(), |near| format!("\n  did you mean {near}?"))
    )]
    NotFound {
        /// Path as given.
        given: String,
        /// Absolute path that was tried.
        tried: String,
        /// Working directory.
        cwd: String,
        /// A file beside it with nearly that name.
        near: Option<String>,
    },
    /// The file cannot be read.
    #[error("cannot read {path}: {error}")]
    Read {
        /// File.
        path: String,
        /// Operating system's error.
        error: io::Error,
    },
    /// A file or folder that a flag or an environment variable names cannot be used.
    #[error("{what} {path}, named by {by}: {error}")]
    Named {
        /// What it should be.
        what: &'static str,
        /// Flag or variable.
        by: String,
        /// Absolute path.
        path: String,
        /// Operating system's error.
        error: io::Error,
    },
    /// Two layers cannot both be meant.
    #[error("{location}: {what}, and {other}\n  {help}")]
    Contradiction {
        /// The place of one of them.
        location: Location,
        /// What it says.
        what: String,
        /// What the other says.
        other: String,
        /// What to write.
        help: String,
    },
    /// The file is far larger than any run config.
    #[error("{path} has {bytes} bytes; a run config has at most {limit}. Is this the right file?")]
    TooLarge {
        /// File.
        path: String,
        /// Its size.
        bytes: u64,
        /// Largest size that is read.
        limit: u64,
    },
    /// A construct that is not understood.
    #[error(transparent)]
    Language(#[from] LanguageError),
    /// A template module is missing.
    #[error(
        "{location}: template module `{module}` not found\n  looked for:{}",
        list(tried)
    )]
    ModuleNotFound {
        /// Where `TEMPLATE_MODULES` names it.
        location: Location,
        /// Name as written, after expansion.
        module: String,
        /// Paths that were tried.
        tried: Vec<String>,
    },
    /// A module was named twice, or the run config names itself.
    #[error("{location}: `{module}` is {why}")]
    ModuleCycle {
        /// Where `TEMPLATE_MODULES` names it.
        location: Location,
        /// Name as written.
        module: String,
        /// What is wrong with it.
        why: String,
    },
    /// `--set` or `LEGORL_SET_` without a usable name or value.
    #[error("{origin}: {problem}")]
    Override {
        /// `--set X` or the environment variable.
        origin: String,
        /// What is wrong.
        problem: String,
    },
    /// Values that do not fit.
    #[error("{} in the configuration:{}", count(.0.len()), list(.0))]
    Values(Vec<ValueProblem>),
}

fn list<T: fmt::Display>(items: &[T]) -> String {
    items.iter().map(|item| format!("\n  {item}")).collect()
}

fn count(n: usize) -> String {
    if n == 1 {
        "1 problem".into()
    } else {
        format!("{n} problems")
    }
}

/// Something that the user should know and that does not stop the run unless `--strict` is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigWarning {
    /// Kind, which decides what `--strict` makes of it.
    pub kind: WarningKind,
    /// The message, with its place.
    pub text: String,
}

/// Kind of a [`ConfigWarning`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WarningKind {
    /// A variable that nobody reads. Fatal under `--strict`.
    UnknownVariable,
    /// A variable of the original that has no effect here.
    NoEffect,
    /// A variable of the process environment that differs from the configuration and was not used.
    AmbientIgnored,
    /// A value was used before a later layer changed it.
    ReadBeforeSet,
    /// One file sets a variable twice.
    SetTwice,
    /// A folder of template modules of the original lies near and is not read.
    ForeignTemplates,
}

impl fmt::Display for ConfigWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
