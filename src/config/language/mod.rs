//! The language of `.env` run configs and template modules: the part of shell syntax that states
//! values. A file is parsed and evaluated here; nothing is executed.
//!
//! ```text
//! file        = { statement }
//! statement   = ["export"] NAME "=" word            assignment
//!             | ["export"] NAME "=(" { word } ")"    array
//!             | "export" NAME { NAME }               accepted; has no further meaning
//!             | ":" { word }                         evaluates the words: `: "${X:=default}"`
//! word        = { plain | '…' | "…" | \c | expansion }
//! expansion   = $X | ${X} | ${X:-w} | ${X-w} | ${X:+w} | ${X+w} | ${X:=w} | ${X=w} | ${X:?w} | ${X?w}
//!             | $((arithmetic)) | $(date [-u] +FORMAT)
//! ```
//!
//! Statements end at a line end or `;`. `#` starts a comment where a word could start. A backslash at
//! a line end joins lines. Files are UTF-8, with or without a byte order mark, with LF or CRLF ends.
//!
//! Differences from a shell, all on the side of an early error:
//! - a plain `${X}` of an unset variable is an error, not an empty text (`${X:-}` allows it);
//! - unquoted `*`, `?`, `[`, `~`, `|`, `&`, `<`, `>` are errors: nothing is globbed or redirected;
//! - any command but `date` is an error that says what to write instead.

mod arithmetic;
mod ast;
mod cursor;
mod date;
mod evaluate;
#[cfg(test)]
mod fuzz;
mod parser;
#[cfg(test)]
mod tests;

pub use evaluate::{Evaluation, Names, Setting};

use super::error::{LanguageError, Location};
use std::{path::PathBuf, sync::Arc};

/// A parsed file.
#[derive(Debug)]
pub struct File {
    statements: Vec<ast::Statement>,
}

/// Parses the bytes of a file.
pub fn parse(file: Arc<PathBuf>, bytes: &[u8]) -> Result<File, LanguageError> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let good = &bytes[..error.valid_up_to()];
        let line = good.iter().filter(|b| **b == b'\n').count() as u32 + 1;
        let start = good.iter().rposition(|b| *b == b'\n').map_or(0, |i| i + 1);
        let column = String::from_utf8_lossy(&good[start..]).chars().count() as u32 + 1;
        LanguageError {
            location: Location {
                file: file.clone(),
                line,
                column,
            },
            problem: "this byte is not valid UTF-8".into(),
            help: "save the file as UTF-8".into(),
        }
    })?;
    parser::Parser::new(file, text).file()
}
