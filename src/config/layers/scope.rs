//! What the files of a run see and set while they are evaluated.

use super::{Entry, Source, MODULES};
use crate::base::{is_secret, remember_secret};
use crate::config::{
    error::{ConfigError, ConfigWarning, LanguageError, Location, WarningKind},
    language::{Names, Setting},
    variables::{self, canonical, DefaultValue},
};
use std::collections::{BTreeMap, BTreeSet};

/// The file that is being evaluated.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Layer {
    Site,
    RunConfig,
    Module,
}

pub(super) struct Scope<'a> {
    /// By canonical name.
    pub values: BTreeMap<String, Entry>,
    pub modules: Vec<(Location, String)>,
    pub layer: Layer,
    pub warnings: Vec<ConfigWarning>,
    /// Names that a file has looked up in the environment.
    pub from_environment: BTreeSet<String>,
    /// Names that a line refers to.
    pub referred: BTreeSet<String>,
    environment: &'a BTreeMap<String, String>,
    /// Names that an override has set.
    locked: BTreeSet<String>,
    /// Table defaults that a file has used in an expression, and where.
    defaults_read: BTreeMap<String, (Location, String)>,
    /// What this file has set, by canonical name: name as written, place, text.
    set_here: BTreeMap<String, (String, Location, String)>,
    has_modules: bool,
}

/// A value for a message.
pub(super) fn shown(name: &str, text: &str) -> String {
    crate::config::show::redacted(name, text)
}

impl<'a> Scope<'a> {
    pub fn new(environment: &'a BTreeMap<String, String>) -> Self {
        Self {
            values: BTreeMap::new(),
            modules: Vec::new(),
            layer: Layer::RunConfig,
            warnings: Vec::new(),
            from_environment: BTreeSet::new(),
            referred: BTreeSet::new(),
            environment,
            locked: BTreeSet::new(),
            defaults_read: BTreeMap::new(),
            set_here: BTreeMap::new(),
            has_modules: false,
        }
    }

    pub fn start_file(&mut self) {
        self.set_here.clear();
    }

    /// Sets a value that no file can change.
    pub fn lock(&mut self, name: &str, text: String, source: Source) {
        self.put(name, text, source);
        self.locked.insert(canonical(name).to_owned());
    }

    fn put(&mut self, name: &str, text: String, source: Source) {
        let variable = canonical(name);
        let entry = Entry {
            text,
            source,
            written_as: (variable != name).then(|| name.to_owned()),
        };
        self.values.insert(variable.to_owned(), entry);
    }

    /// Another value of the same setting in the same layer of overrides.
    pub fn same_layer(&self, name: &str, value: &str, source: &Source) -> Option<String> {
        let entry = self.values.get(canonical(name))?;
        let same = entry.source.layer() == source.layer() && entry.text != value;
        same.then(|| format!("{} (`{}`)", entry.source, shown(name, &entry.text)))
    }

    /// Removes the values of secrets from messages that quote the text around a mistake.
    pub fn without_secrets(&self, error: ConfigError) -> ConfigError {
        let ConfigError::Language(mut error) = error else {
            return error;
        };
        for (name, entry) in &self.values {
            if variables::is_secret(name) && entry.text.len() >= crate::config::show::MIN_SECRET {
                error.problem = error.problem.replace(&entry.text, "<redacted>");
                error.help = error.help.replace(&entry.text, "<redacted>");
            }
        }
        ConfigError::Language(error)
    }

    fn source(&self, location: &Location) -> Source {
        match self.layer {
            Layer::Site => Source::Site(location.clone()),
            Layer::RunConfig => Source::RunConfig(location.clone()),
            Layer::Module => Source::Module(location.clone()),
        }
    }

    fn set_text(&mut self, name: &str, text: String, location: &Location) -> Result<(), LanguageError> {
        let variable = canonical(name);
        if is_secret(name) {
            remember_secret(&text);
        }
        if let Some((written, place, before)) = self.set_here.get(variable) {
            if *before != text && written != name {
                return Err(LanguageError {
                    location: location.clone(),
                    problem: format!(
                        "{name}=`{}` contradicts {written}=`{}` at {place}",
                        shown(name, &text),
                        shown(name, before)
                    ),
                    help: format!("both are the same setting, {variable}: keep one of them"),
                });
            }
            if *before != text && !before.is_empty() {
                self.warnings.push(ConfigWarning {
                    kind: WarningKind::SetTwice,
                    text: format!(
                        "{location}: {name} is set again, to `{}`; `{}` at {place} is lost",
                        shown(name, &text),
                        shown(name, before)
                    ),
                });
            }
        }
        let here = (name.to_owned(), location.clone(), text.clone());
        self.set_here.insert(variable.to_owned(), here);
        if self.locked.contains(variable) {
            return Ok(());
        }
        let read = self.defaults_read.get(variable);
        if let Some((place, used)) = read.filter(|(_, used)| *used != text) {
            self.warnings.push(ConfigWarning {
                kind: WarningKind::ReadBeforeSet,
                text: format!(
                    "{location}: {name} becomes `{}` after its default `{used}` was used at {place}",
                    shown(name, &text)
                ),
            });
        }
        let source = self.source(location);
        self.put(name, text, source);
        Ok(())
    }
}

impl Names for Scope<'_> {
    fn configured(&self, name: &str) -> Option<String> {
        self.values.get(canonical(name)).map(|entry| entry.text.clone())
    }

    fn advice(&self, name: &str) -> Option<&'static str> {
        (name == "SCAFFOLD_COMMAND").then_some(
            "write SCAFFOLD_COMMAND='…' in single quotes: in double quotes its names are looked up here, and the \
             agent's ($LEGORL_RUNTIME, $OPENAI_BASE_URL, …) exist in the sandbox alone (docs/scaffolds.md)",
        )
    }

    fn refer(&mut self, name: &str) {
        self.referred.insert(name.to_owned());
    }

    fn fallback(&mut self, name: &str, location: &Location) -> Option<String> {
        let name = canonical(name);
        match variables::find(name).map(|variable| variable.default) {
            Some(DefaultValue::Value(text)) => {
                self.defaults_read
                    .entry(name.to_owned())
                    .or_insert_with(|| (location.clone(), text.to_owned()));
                Some(text.to_owned())
            }
            Some(_) => None,
            None => self.environment.get(name).cloned(),
        }
    }

    fn environment(&mut self, name: &str) -> Option<String> {
        self.from_environment.insert(name.to_owned());
        self.environment.get(name).cloned()
    }

    fn is_array(&self, name: &str) -> bool {
        name == MODULES && self.has_modules
    }

    fn set(&mut self, name: &str, setting: Setting, location: &Location) -> Result<(), LanguageError> {
        let refuse = |problem: &str, help: &str| {
            Err(LanguageError {
                location: location.clone(),
                problem: problem.into(),
                help: help.into(),
            })
        };
        match setting {
            Setting::Text(_) if name == "REPO_ROOT" => refuse(
                "REPO_ROOT is set by legorl-rank",
                "remove the line; use another variable for another folder",
            ),
            Setting::Text(_) if name == MODULES => refuse(
                "TEMPLATE_MODULES is a list",
                "write TEMPLATE_MODULES=( mode/sync.env engine/fsdp.env )",
            ),
            Setting::Array(_) if name == MODULES && self.layer == Layer::Module => refuse(
                "a template module cannot name further modules",
                "list all modules in the run config",
            ),
            Setting::Array(_) if name == MODULES && self.layer == Layer::Site => {
                refuse("a site file cannot name modules", "list them in the run config")
            }
            Setting::Array(_) if name != MODULES => refuse(
                "only TEMPLATE_MODULES is a list",
                "write one value, in quotes if it holds blanks",
            ),
            Setting::Array(items) => {
                self.modules = items;
                self.has_modules = true;
                Ok(())
            }
            Setting::Text(text) => self.set_text(name, text, location),
        }
    }
}
