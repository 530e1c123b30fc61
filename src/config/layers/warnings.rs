//! What is suspicious about a set of layers.

use super::{Layered, OVERRIDE_PREFIX};
use crate::config::{
    error::{ConfigError, ConfigWarning, Location, WarningKind},
    settings::values::{Backend, ModelEngine, RunKind, Scaffold, TrainingMode},
    variables::{self, remote, DefaultValue, Variable},
};
use std::collections::{BTreeMap, BTreeSet};

/// More warnings than anyone reads.
const MAX_WARNINGS: usize = 100;

/// Leaves the first [`MAX_WARNINGS`] and says how many there were.
pub(super) fn limit(warnings: &mut Vec<ConfigWarning>) {
    let count = warnings.len();
    if count > MAX_WARNINGS {
        // What --strict refuses stays in.
        warnings.sort_by_key(|warning| warning.kind != WarningKind::UnknownVariable);
        warnings.truncate(MAX_WARNINGS);
        warnings.push(ConfigWarning {
            kind: WarningKind::NoEffect,
            text: format!("{} further warnings are not shown", count - MAX_WARNINGS),
        });
    }
}

/// The value of a variable before it is typed: some layer's, or the table's.
fn text_of<'a>(layered: &'a Layered, variable: &Variable) -> &'a str {
    match (layered.get(variable.name), variable.default) {
        (Some(entry), _) => entry.text.as_str(),
        (None, DefaultValue::Value(text)) => text,
        (None, _) => "",
    }
}

/// The axis and its value to which a module belongs, by its name.
fn axis_of(module: &str) -> Option<(&'static str, &str)> {
    let (folder, file) = module.rsplit_once('/')?;
    let value = file.strip_suffix(".env")?;
    let axes: &[(&str, &str, &[&str])] = &[
        ("mode", "TRAINING_MODE", TrainingMode::NAMES),
        ("verl", "TRAINING_MODE", TrainingMode::NAMES),
        ("engine", "MODEL_ENGINE", ModelEngine::NAMES),
        ("verl", "MODEL_ENGINE", ModelEngine::NAMES),
        ("scaffold", "SCAFFOLD", Scaffold::NAMES),
        ("backend", "BACKEND", Backend::NAMES),
    ];
    let folder = folder.rsplit('/').next().unwrap_or(folder);
    axes.iter()
        .find(|(name, _, values)| *name == folder && values.contains(&value))
        .map(|(_, variable, _)| (*variable, value))
}

/// A module of one value of an axis in a run with another one would bring the wrong defaults.
pub(super) fn axes(layered: &Layered, modules: &[(Location, String)]) -> Result<(), ConfigError> {
    for (location, module) in modules {
        let Some((name, value)) = axis_of(module) else {
            continue;
        };
        let Some(entry) = layered.get(name) else {
            continue;
        };
        if entry.text != value {
            return Err(ConfigError::Contradiction {
                location: location.clone(),
                what: format!("the module `{module}` belongs to {name}={value}"),
                other: format!("{name} is `{}` ({})", entry.text, entry.source),
                help: format!("name the module as \"…/${{{name}}}.env\", or set {name}={value}"),
            });
        }
    }
    Ok(())
}

/// Names that nobody reads.
pub(super) fn names(layered: &Layered, referred: &BTreeSet<String>, kind: RunKind) -> Vec<ConfigWarning> {
    let mut warnings = Vec::new();
    let mut unknown = 0;
    for (name, entry) in layered.iter() {
        let place = &entry.source;
        if name == "REPO_ROOT" {
            continue;
        }
        if let Some(variable) = variables::find(name) {
            if !variable.is_for(kind) && !matches!(place, super::Source::Module(_)) {
                let kinds: Vec<&str> = variable.kinds.iter().map(|kind| kind.name()).collect();
                warnings.push(ConfigWarning {
                    kind: WarningKind::NoEffect,
                    text: format!(
                        "{place}: {name} has no effect in `{kind}`; it is for `{}`",
                        kinds.join("`, `")
                    ),
                });
            }
            continue;
        }
        let is_helper = referred.contains(name);
        if let Some(inert) = variables::no_effect(name) {
            if !is_helper {
                warnings.push(ConfigWarning {
                    kind: WarningKind::NoEffect,
                    text: format!("{place}: {name} has no effect. {}", inert.reason),
                });
            }
            continue;
        }
        unknown += 1;
        // Comparing with every known name takes microseconds; a file of another kind has thousands.
        let near = if unknown > MAX_WARNINGS {
            None
        } else {
            variables::nearest(name)
        };
        // A name of one's own, for other lines to refer to.
        if is_helper && near.is_none() {
            continue;
        }
        let hint = match near {
            Some(near) => format!("did you mean {near}?"),
            None => "no variable has a similar name; docs/configuration.md lists all".to_owned(),
        };
        warnings.push(ConfigWarning {
            kind: WarningKind::UnknownVariable,
            text: format!("{place}: unknown variable {name}; {hint}"),
        });
    }
    warnings
}

/// True if the variable means something for the backend of this run.
fn matters(variable: &Variable, backend: &str) -> bool {
    match variable.section {
        remote::KUBERNETES => backend == Backend::K8s.name(),
        remote::DOCKER => backend == Backend::Docker.name(),
        remote::IMAGES | remote::AGENT_FILES => backend != Backend::Process.name(),
        _ => true,
    }
}

/// Variables of the process environment that would have changed the run if they counted.
pub(super) fn ambient(
    layered: &Layered,
    environment: &BTreeMap<String, String>,
    from_environment: &BTreeSet<String>,
) -> Vec<ConfigWarning> {
    let backend = variables::find("BACKEND").map_or("", |variable| text_of(layered, variable));
    let names = variables::all()
        .filter(|variable| !from_environment.contains(variable.name) && matters(variable, backend))
        .filter(|variable| {
            environment
                .get(variable.name)
                .is_some_and(|outside| outside != text_of(layered, variable))
        });
    names
        .map(|variable| ConfigWarning {
            kind: WarningKind::AmbientIgnored,
            text: format!(
                "{name} in the environment differs from the configuration and is not used; \
                 {OVERRIDE_PREFIX}{name} would override it",
                name = variable.name
            ),
        })
        .collect()
}
