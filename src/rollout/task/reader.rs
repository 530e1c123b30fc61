//! Reads a TOML document field by field and collects every problem with its line.
//!
//! Conversions follow the rules that `harbor` uses (pydantic's lax mode), so that both give the same
//! verdict on a file:
//!
//! | Field | Accepts |
//! |---|---|
//! | string | a string |
//! | float | float, integer, boolean (0 or 1), a string that reads as a number |
//! | integer | integer, boolean, a float without fraction, a string that reads as an integer |
//! | boolean | boolean, 0 or 1, `"true"`/`"false"`, `"yes"`/`"no"`, `"on"`/`"off"`, `"1"`/`"0"` … |
//! | list, table | only a list, only a table |
//!
//! A field that no rule knows is a warning, since `harbor` reads past it; the warning names the nearest
//! known field, because a misspelt limit would otherwise be silently without effect.

use serde::Serialize;
use std::{cell::RefCell, collections::BTreeMap, fmt, ops::Range};
use toml::de::{DeTable, DeValue};
use toml::Spanned;

/// How much a [`Finding`] matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// The task can run; something in it has no effect or is deprecated.
    Warning,
    /// The task is valid, and this program does not run what it asks for.
    Unsupported,
    /// The task breaks the format.
    Error,
}

/// One problem of a task file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How much it matters.
    pub severity: Severity,
    /// File, as given by the caller.
    pub file: String,
    /// Line in the file, from 1; 0 when the problem is the file itself.
    pub line: usize,
    /// Dotted name of the field, empty for the whole file.
    pub field: String,
    /// What is wrong and what would be right.
    pub problem: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        f.write_str(": ")?;
        if self.severity == Severity::Warning {
            f.write_str("warning: ")?;
        }
        if !self.field.is_empty() {
            write!(f, "`{}` ", self.field)?;
        }
        f.write_str(&self.problem)
    }
}

/// Collects the findings of one document.
#[derive(Debug)]
pub(super) struct Findings<'a> {
    file: &'a str,
    text: &'a str,
    list: RefCell<Vec<Finding>>,
}

impl<'a> Findings<'a> {
    pub(super) fn new(file: &'a str, text: &'a str) -> Self {
        Self {
            file,
            text,
            list: RefCell::new(Vec::new()),
        }
    }

    pub(super) fn into_list(self) -> Vec<Finding> {
        self.list.into_inner()
    }

    fn line_of(&self, offset: usize) -> usize {
        let end = offset.min(self.text.len());
        self.text.as_bytes()[..end]
            .iter()
            .filter(|b| **b == b'\n')
            .count()
            + 1
    }

    pub(super) fn push(
        &self,
        severity: Severity,
        span: Range<usize>,
        field: &str,
        problem: impl Into<String>,
    ) {
        self.list.borrow_mut().push(Finding {
            severity,
            file: self.file.to_owned(),
            line: self.line_of(span.start),
            field: field.to_owned(),
            problem: problem.into(),
        });
    }
}

/// A value with its place in the document.
#[derive(Clone)]
pub(super) struct Node<'d> {
    findings: &'d Findings<'d>,
    path: String,
    span: Range<usize>,
    value: &'d DeValue<'d>,
}

/// A table whose fields are taken one after the other; what is left at the end is unknown.
pub(super) struct Fields<'d> {
    findings: &'d Findings<'d>,
    path: String,
    span: Range<usize>,
    rest: BTreeMap<String, (Range<usize>, &'d Spanned<DeValue<'d>>)>,
    known: Vec<&'static str>,
}

fn type_name(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "an integer",
        DeValue::Float(_) => "a float",
        DeValue::Boolean(_) => "a boolean",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

fn integer(value: &toml::de::DeInteger<'_>) -> Option<i64> {
    i64::from_str_radix(value.as_str(), value.radix()).ok()
}

/// An integer as text: digits, and a fraction of zeros, which is how a float prints a whole number.
fn integer_text(text: &str) -> Option<i64> {
    let text = text.trim();
    let whole = match text.split_once('.') {
        Some((whole, zeros)) if !zeros.is_empty() && zeros.bytes().all(|b| b == b'0') => whole,
        Some(_) => return None,
        None => text,
    };
    whole.parse().ok()
}

impl<'d> Node<'d> {
    pub(super) fn error(&self, problem: impl Into<String>) {
        self.findings
            .push(Severity::Error, self.span.clone(), &self.path, problem);
    }

    pub(super) fn warn(&self, problem: impl Into<String>) {
        self.findings
            .push(Severity::Warning, self.span.clone(), &self.path, problem);
    }

    fn wrong_type(&self, wanted: &str) {
        self.error(format!("must be {wanted} and is {}", type_name(self.value)));
    }

    pub(super) fn is_string(&self) -> bool {
        matches!(self.value, DeValue::String(_))
    }

    pub(super) fn is_table(&self) -> bool {
        matches!(self.value, DeValue::Table(_))
    }

    pub(super) fn string(&self) -> Option<String> {
        match self.value {
            DeValue::String(s) => Some(s.to_string()),
            _ => {
                self.wrong_type("a string");
                None
            }
        }
    }

    pub(super) fn float(&self) -> Option<f64> {
        let parsed = match self.value {
            DeValue::Float(f) => f.as_str().parse().ok(),
            DeValue::Integer(i) => integer(i).map(|i| i as f64),
            DeValue::Boolean(b) => Some(f64::from(u8::from(*b))),
            DeValue::String(s) => s.trim().parse().ok(),
            _ => None,
        };
        if parsed.is_none() {
            self.wrong_type("a number");
        }
        parsed
    }

    pub(super) fn integer(&self) -> Option<i64> {
        let parsed = match self.value {
            DeValue::Integer(i) => integer(i),
            DeValue::Boolean(b) => Some(i64::from(*b)),
            DeValue::Float(f) => f
                .as_str()
                .parse::<f64>()
                .ok()
                .filter(|f| f.fract() == 0.0 && f.abs() < 9e18)
                .map(|f| f as i64),
            DeValue::String(s) => integer_text(s),
            _ => None,
        };
        if parsed.is_none() {
            self.wrong_type("a whole number");
        }
        parsed
    }

    pub(super) fn boolean(&self) -> Option<bool> {
        let parsed = match self.value {
            DeValue::Boolean(b) => Some(*b),
            DeValue::Integer(i) => match integer(i) {
                Some(0) => Some(false),
                Some(1) => Some(true),
                _ => None,
            },
            DeValue::Float(f) => match f.as_str().parse::<f64>() {
                Ok(0.0) => Some(false),
                Ok(1.0) => Some(true),
                _ => None,
            },
            DeValue::String(s) => match s.to_ascii_lowercase().as_str() {
                "true" | "t" | "yes" | "y" | "on" | "1" => Some(true),
                "false" | "f" | "no" | "n" | "off" | "0" => Some(false),
                _ => None,
            },
            _ => None,
        };
        if parsed.is_none() {
            self.wrong_type("true or false");
        }
        parsed
    }

    /// A user name or a number, as text.
    pub(super) fn user(&self) -> Option<String> {
        if self.is_string() {
            return self.string();
        }
        match self.value {
            DeValue::Integer(_) | DeValue::Float(_) | DeValue::Boolean(_) => {
                self.integer().map(|i| i.to_string())
            }
            _ => {
                self.wrong_type("a user name or a user id");
                None
            }
        }
    }

    pub(super) fn list(&self) -> Option<Vec<Node<'d>>> {
        match self.value {
            DeValue::Array(items) => Some(
                items
                    .iter()
                    .enumerate()
                    .map(|(i, item)| Node {
                        findings: self.findings,
                        path: format!("{}[{i}]", self.path),
                        span: item.span(),
                        value: item.get_ref(),
                    })
                    .collect(),
            ),
            _ => {
                self.wrong_type("a list");
                None
            }
        }
    }

    pub(super) fn strings(&self) -> Option<Vec<String>> {
        let items = self.list()?;
        let strings: Vec<_> = items.iter().filter_map(Node::string).collect();
        (strings.len() == items.len()).then_some(strings)
    }

    pub(super) fn string_map(&self) -> Option<BTreeMap<String, String>> {
        let entries = self.entries("a table of strings")?;
        let map: BTreeMap<_, _> = entries
            .iter()
            .filter_map(|(key, node)| Some((key.clone(), node.string()?)))
            .collect();
        (map.len() == entries.len()).then_some(map)
    }

    pub(super) fn float_map(&self) -> Option<BTreeMap<String, f64>> {
        let entries = self.entries("a number or a table of numbers")?;
        let map: BTreeMap<_, _> = entries
            .iter()
            .filter_map(|(key, node)| Some((key.clone(), node.float()?)))
            .collect();
        (map.len() == entries.len()).then_some(map)
    }

    /// Free-form value as JSON (dates become text).
    pub(super) fn json(&self) -> serde_json::Value {
        use serde_json::Value;
        match self.value {
            DeValue::String(s) => Value::from(s.as_ref()),
            DeValue::Integer(i) => integer(i).map_or_else(|| Value::from(i.to_string()), Value::from),
            DeValue::Float(f) => f
                .as_str()
                .parse::<f64>()
                .ok()
                .and_then(serde_json::Number::from_f64)
                .map_or_else(|| Value::from(f.as_str()), Value::Number),
            DeValue::Boolean(b) => Value::from(*b),
            DeValue::Datetime(d) => Value::from(d.to_string()),
            DeValue::Array(_) => self.list().into_iter().flatten().map(|n| n.json()).collect(),
            DeValue::Table(_) => self
                .entries("a table")
                .into_iter()
                .flatten()
                .map(|(key, node)| (key, node.json()))
                .collect(),
        }
    }

    fn entries(&self, wanted: &str) -> Option<Vec<(String, Node<'d>)>> {
        match self.value {
            DeValue::Table(table) => Some(
                table
                    .iter()
                    .map(|(key, value)| {
                        let node = Node {
                            findings: self.findings,
                            path: format!("{}.{}", self.path, key.get_ref()),
                            span: value.span(),
                            value: value.get_ref(),
                        };
                        (key.get_ref().to_string(), node)
                    })
                    .collect(),
            ),
            _ => {
                self.wrong_type(wanted);
                None
            }
        }
    }

    pub(super) fn fields(&self) -> Option<Fields<'d>> {
        match self.value {
            DeValue::Table(table) => Some(Fields::new(
                self.findings,
                self.path.clone(),
                self.span.clone(),
                table,
            )),
            _ => {
                self.wrong_type("a table");
                None
            }
        }
    }
}

impl<'d> Fields<'d> {
    pub(super) fn new(
        findings: &'d Findings<'d>,
        path: String,
        span: Range<usize>,
        table: &'d DeTable<'d>,
    ) -> Self {
        Self {
            findings,
            path,
            span,
            rest: table
                .iter()
                .map(|(key, value)| (key.get_ref().to_string(), (key.span(), value)))
                .collect(),
            known: Vec::new(),
        }
    }

    fn path_of(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.path)
        }
    }

    /// Takes a field.
    pub(super) fn take(&mut self, name: &'static str) -> Option<Node<'d>> {
        self.known.push(name);
        let (_, value) = self.rest.remove(name)?;
        Some(Node {
            findings: self.findings,
            path: self.path_of(name),
            span: value.span(),
            value: value.get_ref(),
        })
    }

    /// True if the field is written and not yet taken.
    pub(super) fn has(&self, name: &str) -> bool {
        self.rest.contains_key(name)
    }

    /// Takes a field that must be there.
    pub(super) fn require(&mut self, name: &'static str) -> Option<Node<'d>> {
        let node = self.take(name);
        if node.is_none() {
            self.error(format!("needs a field `{name}`"));
        }
        node
    }

    /// A problem of the table as a whole.
    pub(super) fn error(&self, problem: impl Into<String>) {
        self.findings
            .push(Severity::Error, self.span.clone(), &self.path, problem);
    }

    /// Reports what was not taken.
    pub(super) fn finish(self) {
        for (name, (span, _)) in &self.rest {
            let nearest = self
                .known
                .iter()
                .map(|known| (strsim::damerau_levenshtein(known, name), known))
                .min()
                .filter(|(distance, _)| *distance <= 3);
            let hint = nearest.map_or_else(String::new, |(_, known)| {
                format!("; the nearest one is `{known}`")
            });
            self.findings.push(
                Severity::Warning,
                span.clone(),
                &self.path_of(name),
                format!("is not a field of the task format and has no effect{hint}"),
            );
        }
    }
}
