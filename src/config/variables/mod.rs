//! The table of every variable. Parsing, validation, `config show` and `docs/configuration.md` are made
//! from it; adding a variable means adding a row here and reading it in `settings::resolve`.

mod algorithm;
pub mod aliases;
mod inert;
pub mod offline;
pub mod remote;
mod rollout;
mod run;

pub use crate::base::is_secret;
use crate::config::settings::values::RunKind;
pub use aliases::{canonical, ALIASES};
pub use inert::{no_effect, NoEffect, NO_EFFECT};

/// What a value must look like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Any text.
    Text,
    /// A file or folder; relative paths count from `REPO_ROOT`.
    Path,
    /// A whole number in a range, both ends included.
    Integer {
        /// Smallest value.
        min: i64,
        /// Largest value.
        max: i64,
    },
    /// A finite number in a range, both ends included.
    Number {
        /// Smallest value.
        min: f64,
        /// Largest value.
        max: f64,
    },
    /// `True` or `False` (also `1`, `0`, `yes`, `no`, `on`, `off`, in any case).
    Bool,
    /// One of these names.
    Choice(&'static [&'static str]),
}

/// What holds when no layer sets the variable.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DefaultValue {
    /// A run that reads the variable cannot start without a value.
    Required,
    /// This text.
    Value(&'static str),
    /// Computed from other variables, as this sentence says.
    Derived(&'static str),
    /// No value, which means what this sentence says.
    Unset(&'static str),
}

/// Who needs to look at a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Everyone who starts a run.
    Essential,
    /// Whoever changes how a run trains.
    Common,
    /// Rarely touched.
    Advanced,
}

/// One variable of a run config.
#[derive(Clone, Copy, Debug)]
pub struct Variable {
    /// Name.
    pub name: &'static str,
    /// Section of the documentation.
    pub section: &'static str,
    /// Form of its value.
    pub kind: Kind,
    /// Without a value.
    pub default: DefaultValue,
    /// Unit, or nothing.
    pub unit: &'static str,
    /// Who needs it.
    pub tier: Tier,
    /// What it does, in one or two sentences.
    pub doc: &'static str,
    /// Kinds of run that read it; elsewhere it is neither required nor checked.
    pub kinds: &'static [RunKind],
    /// The values that this version can launch, where it cannot launch all: `Some(&[])` is none but the
    /// unset one. Preflight says `not in this version` for others.
    pub available: Option<&'static [&'static str]>,
}

impl Variable {
    /// Limits the row to kinds of run.
    const fn only_for(mut self, kinds: &'static [RunKind]) -> Self {
        self.kinds = kinds;
        self
    }

    /// Names the values that this version can launch.
    const fn only(mut self, values: &'static [&'static str]) -> Self {
        self.available = Some(values);
        self
    }

    /// True if a run of this kind reads the variable.
    pub fn is_for(&self, kind: RunKind) -> bool {
        self.kinds.contains(&kind)
    }
}

/// Every variable that has an effect, by section and in reading order.
pub fn all() -> impl Iterator<Item = &'static Variable> {
    [
        run::VARIABLES,
        algorithm::VARIABLES,
        rollout::VARIABLES,
        remote::VARIABLES,
        offline::VARIABLES,
    ]
    .into_iter()
    .flatten()
}

/// The variable with this name.
pub fn find(name: &str) -> Option<&'static Variable> {
    all().find(|v| v.name == name)
}

/// Every name that a configuration may use.
pub fn names() -> impl Iterator<Item = &'static str> {
    all()
        .map(|v| v.name)
        .chain(ALIASES.iter().map(|(alias, _)| *alias))
        .chain(NO_EFFECT.iter().map(|n| n.name))
}

/// The known name that is nearest to `name`, if one is near enough to be what was meant.
pub fn nearest(name: &str) -> Option<&'static str> {
    const LONGEST: usize = 64;
    if name.len() > LONGEST {
        return None;
    }
    let typed = name.to_ascii_uppercase();
    names()
        .map(|known| (strsim::damerau_levenshtein(&typed, known), known))
        .min()
        .filter(|(distance, known)| *distance <= 1 + known.len().max(name.len()) / 5)
        .map(|(_, known)| known)
}

const fn row(
    section: &'static str,
    name: &'static str,
    kind: Kind,
    default: DefaultValue,
    unit: &'static str,
    tier: Tier,
    doc: &'static str,
) -> Variable {
    Variable {
        name,
        section,
        kind,
        default,
        unit,
        tier,
        doc,
        kinds: RunKind::ALL,
        available: None,
    }
}

/// Whole numbers from `min` to `max`: more is a mistake, and products of such numbers stay small.
const fn whole(min: i64, max: i64) -> Kind {
    Kind::Integer { min, max }
}

/// Whole numbers from `min`, bounded so that products of sizes stay inside 64 bits.
const fn integer(min: i64) -> Kind {
    Kind::Integer {
        min,
        max: u32::MAX as i64,
    }
}

/// Numbers from `min` up.
const fn number(min: f64) -> Kind {
    Kind::Number { min, max: 1e12 }
}

const fn between(min: f64, max: f64) -> Kind {
    Kind::Number { min, max }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_row_is_well_formed() {
        let mut seen = BTreeSet::new();
        for variable in all() {
            assert!(seen.insert(variable.name), "{} is listed twice", variable.name);
            assert!(
                variable
                    .name
                    .chars()
                    .all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'),
                "{}",
                variable.name
            );
            assert!(
                variable.doc.ends_with('.'),
                "{}: the text must be a sentence",
                variable.name
            );
            if let DefaultValue::Value(text) = variable.default {
                let checked = crate::config::settings::check_text(variable, text);
                assert_eq!(
                    checked,
                    Ok(()),
                    "{}: its default does not fit its own kind",
                    variable.name
                );
            }
        }
        for (alias, variable) in ALIASES {
            assert!(seen.insert(alias), "{alias} is listed twice");
            assert!(find(variable).is_some(), "{alias} is a second name of nothing");
        }
        for entry in NO_EFFECT {
            assert!(seen.insert(entry.name), "{} is listed twice", entry.name);
            assert!(entry.reason.ends_with('.'), "{}", entry.name);
        }
    }

    #[test]
    fn a_near_name_is_found_and_a_far_one_is_not() {
        assert_eq!(nearest("TRAIN_BZS"), Some("TRAIN_BSZ"));
        assert_eq!(nearest("MODLE_PATH"), Some("MODEL_PATH"));
        assert_eq!(nearest("train_bsz"), Some("TRAIN_BSZ"));
        assert_eq!(nearest("COMPLETELY_DIFFERENT_THING"), None);
    }
}
