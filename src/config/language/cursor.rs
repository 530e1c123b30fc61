//! A position in the text of a file, with line and column.

use super::super::error::{LanguageError, Location};
use std::{path::PathBuf, sync::Arc};

pub(super) struct Cursor {
    file: Arc<PathBuf>,
    chars: Vec<char>,
    at: usize,
    line: u32,
    column: u32,
}

impl Cursor {
    pub(super) fn new(file: Arc<PathBuf>, text: &str) -> Self {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        // CRLF: the line feed alone ends a line.
        let mut chars = Vec::with_capacity(text.len());
        let mut rest = text.chars().peekable();
        while let Some(c) = rest.next() {
            if c != '\r' || rest.peek().is_some_and(|next| *next != '\n') {
                chars.push(c);
            }
        }
        Self {
            file,
            chars,
            at: 0,
            line: 1,
            column: 1,
        }
    }

    pub(super) fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    pub(super) fn peek_at(&self, ahead: usize) -> Option<char> {
        self.chars.get(self.at + ahead).copied()
    }

    /// The character `back` places before the cursor.
    pub(super) fn before(&self, back: usize) -> Option<char> {
        self.at
            .checked_sub(back)
            .and_then(|at| self.chars.get(at))
            .copied()
    }

    pub(super) fn starts_with(&self, text: &str) -> bool {
        text.chars().enumerate().all(|(i, c)| self.peek_at(i) == Some(c))
    }

    pub(super) fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += 1;
        if c == '\n' {
            self.line += 1;
            self.column = 1;
        } else {
            self.column += 1;
        }
        Some(c)
    }

    pub(super) fn skip(&mut self, count: usize) {
        for _ in 0..count {
            self.next();
        }
    }

    /// Skips blanks and joined lines.
    pub(super) fn skip_blanks(&mut self) {
        loop {
            match self.peek() {
                Some(' ' | '\t') => self.skip(1),
                Some('\\') if self.peek_at(1) == Some('\n') => self.skip(2),
                _ => return,
            }
        }
    }

    /// Skips a comment up to the line end.
    pub(super) fn skip_line(&mut self) {
        while self.peek().is_some_and(|c| c != '\n') {
            self.skip(1);
        }
    }

    pub(super) fn location(&self) -> Location {
        Location {
            file: self.file.clone(),
            line: self.line,
            column: self.column,
        }
    }

    pub(super) fn fail<T>(
        &self,
        problem: impl Into<String>,
        help: impl Into<String>,
    ) -> Result<T, LanguageError> {
        fail_at(self.location(), problem, help)
    }

    /// A name at the cursor, or an empty text.
    pub(super) fn name(&mut self) -> String {
        let mut name = String::new();
        while let Some(c) = self.peek() {
            let fits = c == '_' || c.is_ascii_alphabetic() || (!name.is_empty() && c.is_ascii_digit());
            if !fits {
                break;
            }
            name.push(c);
            self.skip(1);
        }
        name
    }

    /// The text up to the next blank or line end, shortened, for messages.
    pub(super) fn preview(&self) -> String {
        self.chars[self.at.min(self.chars.len())..]
            .iter()
            .take_while(|c| !c.is_whitespace())
            .take(24)
            .collect()
    }
}

pub(super) fn fail_at<T>(
    location: Location,
    problem: impl Into<String>,
    help: impl Into<String>,
) -> Result<T, LanguageError> {
    Err(LanguageError {
        location,
        problem: problem.into(),
        help: help.into(),
    })
}
