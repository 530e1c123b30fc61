//! From a parsed file to values.

use super::super::error::{LanguageError, Location};
use super::{arithmetic, ast::*, cursor::fail_at, date, File};
use std::time::SystemTime;

/// What an assignment found in a file does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Setting {
    /// `NAME=text`.
    Text(String),
    /// `NAME=(…)`, each item with its place.
    Array(Vec<(Location, String)>),
}

/// The variables that a file sees and sets.
pub trait Names {
    /// Text of a variable that a configuration file or an override has set.
    fn configured(&self, name: &str) -> Option<String>;
    /// Text that stands in for a variable that no file has set: its documented default, or a variable
    /// of the process environment that the table does not know.
    fn fallback(&mut self, name: &str, location: &Location) -> Option<String>;
    /// A variable of the process environment, for `${X:-…}` and its relatives.
    fn environment(&mut self, name: &str) -> Option<String>;
    /// What to write instead where the value of this variable refers to one that is not set; `None` for the
    /// ordinary advice.
    fn advice(&self, _name: &str) -> Option<&'static str> {
        None
    }
    /// Notes that a line refers to a variable.
    fn refer(&mut self, _name: &str) {}
    /// True for arrays, which have no text.
    fn is_array(&self, name: &str) -> bool;
    /// Sets a variable.
    fn set(&mut self, name: &str, setting: Setting, location: &Location) -> Result<(), LanguageError>;
}

/// End of the problem of a plain reference to nothing.
const NOT_SET: &str = " is not set";

/// One evaluation of a file.
pub struct Evaluation<'a> {
    names: &'a mut dyn Names,
    /// The moment that `$(date …)` shows.
    now: SystemTime,
    /// Bytes that may still be expanded.
    budget: usize,
}

/// Longest text of one variable, so that repeated doubling ends in an error and not in memory.
const MAX_TEXT_BYTES: usize = 1 << 20;

/// Text that one file may expand in all, so that many large expansions end as well.
const MAX_TOTAL_BYTES: usize = 64 << 20;

type Evaluated<T> = Result<T, LanguageError>;

impl<'a> Evaluation<'a> {
    /// An evaluation that reads and sets `names`; `now` is the moment that `$(date …)` shows.
    pub fn new(names: &'a mut dyn Names, now: SystemTime) -> Self {
        Self {
            names,
            now,
            budget: MAX_TOTAL_BYTES,
        }
    }

    /// Takes the size of a text off the budget.
    fn spend(&mut self, text: &str, location: &Location) -> Evaluated<()> {
        match self.budget.checked_sub(text.len()) {
            Some(rest) => {
                self.budget = rest;
                Ok(())
            }
            None => fail_at(
                location.clone(),
                format!("the values of this file grow beyond {MAX_TOTAL_BYTES} bytes"),
                "a run config holds short values",
            ),
        }
    }

    /// Runs through the statements in order.
    pub fn run(&mut self, file: &File) -> Evaluated<()> {
        for statement in &file.statements {
            let location = &statement.location;
            match &statement.kind {
                StatementKind::Assign { name, value } => {
                    let text = self.value_of(name, value)?;
                    self.names.set(name, Setting::Text(text), location)?;
                }
                StatementKind::AssignArray { name, items } => {
                    let mut texts = Vec::with_capacity(items.len());
                    for (place, item) in items {
                        texts.push((place.clone(), self.word(item, false)?));
                    }
                    self.names.set(name, Setting::Array(texts), location)?;
                }
                StatementKind::Export { name } => {
                    if self.names.configured(name).is_none() && !self.names.is_array(name) {
                        return fail_at(
                            location.clone(),
                            format!("{name} is exported and has no value here"),
                            format!("write `export {name}=value`, or remove the line"),
                        );
                    }
                }
                StatementKind::Evaluate { words } => {
                    for word in words {
                        self.word(word, true)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The text that is assigned to `name`.
    fn value_of(&mut self, name: &str, value: &Word) -> Evaluated<String> {
        self.word(value, false)
            .map_err(|error| match self.names.advice(name) {
                Some(help) if error.problem.ends_with(NOT_SET) => LanguageError {
                    help: help.to_owned(),
                    ..error
                },
                _ => error,
            })
    }

    /// `only_configured`: in `: "${X:=d}"` and `: "${X:?m}"` the process environment does not count,
    /// since the statement is about what the run is configured with.
    fn word(&mut self, word: &Word, only_configured: bool) -> Evaluated<String> {
        let mut text = String::new();
        for part in &word.parts {
            let (location, piece) = match part {
                Part::Literal(literal) => {
                    text.push_str(literal);
                    continue;
                }
                Part::Variable {
                    location,
                    name,
                    operation,
                } => (
                    location,
                    self.variable(location, name, operation.as_ref(), only_configured)?,
                ),
                Part::Arithmetic(expression) => (&expression.location, self.number(expression)?.to_string()),
                Part::Date {
                    location,
                    utc,
                    format,
                } => {
                    let format = self.word(format, false)?;
                    let format = format.strip_prefix('+').unwrap_or(&format);
                    (location, date::format(self.now, *utc, format, location)?)
                }
            };
            text.push_str(&piece);
            if text.len() > MAX_TEXT_BYTES {
                return fail_at(
                    location.clone(),
                    format!("the value grows beyond {MAX_TEXT_BYTES} bytes"),
                    "a run config holds short values",
                );
            }
        }
        Ok(text)
    }

    fn variable(
        &mut self,
        location: &Location,
        name: &str,
        operation: Option<&Operation>,
        only_configured: bool,
    ) -> Evaluated<String> {
        if self.names.is_array(name) {
            return fail_at(
                location.clone(),
                format!("{name} is an array and has no single value"),
                "use its items where they are needed",
            );
        }
        if operation.is_none_or(|o| matches!(o.kind, OperationKind::Otherwise | OperationKind::Alternative)) {
            self.names.refer(name);
        }
        let Some(operation) = operation else {
            let value = self.names.configured(name);
            return match value.or_else(|| self.names.fallback(name, location)) {
                Some(text) => {
                    self.spend(&text, location)?;
                    Ok(text)
                }
                None => fail_at(
                    location.clone(),
                    format!("{name}{NOT_SET}"),
                    format!("set it above this line, or write ${{{name}:-}} if it may be empty"),
                ),
            };
        };
        let mut value = self.names.configured(name);
        if value.is_none() && !only_configured && operation.kind != OperationKind::Assign {
            value = self.names.environment(name);
        }
        if let Some(text) = &value {
            self.spend(text, location)?;
        }
        let value = value.filter(|text| !(operation.empty_is_unset && text.is_empty()));
        match (operation.kind, value) {
            (OperationKind::Alternative, Some(_)) => self.word(&operation.word, false),
            (OperationKind::Alternative, None) => Ok(String::new()),
            (_, Some(text)) => Ok(text),
            (OperationKind::Otherwise, None) => self.word(&operation.word, false),
            (OperationKind::Assign, None) => {
                let text = self.value_of(name, &operation.word)?;
                self.names.set(name, Setting::Text(text.clone()), location)?;
                Ok(text)
            }
            (OperationKind::Require, None) => {
                let message = self.word(&operation.word, false)?;
                let problem = if message.is_empty() {
                    format!("{name} is required")
                } else {
                    format!("{name}: {message}")
                };
                fail_at(
                    location.clone(),
                    problem,
                    format!("set {name} in the run config, or pass --set {name}=…"),
                )
            }
        }
    }

    fn number(&mut self, expression: &Expression) -> Evaluated<i64> {
        let location = &expression.location;
        match &expression.kind {
            ExpressionKind::Number(n) => Ok(*n),
            ExpressionKind::Name(name) => {
                let text = self.variable(location, name, None, false)?;
                arithmetic::number(location, text.trim(), name)
            }
            ExpressionKind::Text(word) => {
                let text = self.word(word, false)?;
                arithmetic::number(location, text.trim(), "this value")
            }
            ExpressionKind::Unary(operator, inner) => {
                let value = self.number(inner)?;
                arithmetic::apply_unary(*operator, value, location)
            }
            ExpressionKind::Binary(operator, left, right) => {
                let a = self.number(left)?;
                match (operator, a != 0) {
                    (Binary::Or, true) => return Ok(1),
                    (Binary::And, false) => return Ok(0),
                    _ => {}
                }
                let b = self.number(right)?;
                arithmetic::apply_binary(*operator, a, b, location)
            }
            ExpressionKind::Choose(condition, yes, no) => {
                let chosen = if self.number(condition)? != 0 { yes } else { no };
                self.number(chosen)
            }
        }
    }
}
