//! Layers with provenance: table defaults < template modules < site file < run config <
//! `LEGORL_SET_KEY` in the environment < `--set KEY=VALUE`.
//!
//! The site file (optional: `--site FILE`, or `LEGORL_SITE` in the environment) is evaluated first, so
//! that the run config can refer to it; then the run config, which replaces what the site file set; then
//! the modules that `TEMPLATE_MODULES` names, in order. Modules set values with `: "${X:=default}"`, so
//! they never replace a value of the files before them. An override is there before the first line is
//! read and cannot be assigned to, so values that are computed from it follow it.
//!
//! The plain process environment counts only where a file refers to it by `${X:-…}`, `${X:+…}`,
//! `${X:?…}`, or by a plain `${X}` of a name that is not a variable of this program (`${HOME}`,
//! `${SLURM_JOB_ID}`). An ambient `NNODES` changes nothing and is reported.
//!
//! Second names ([`variables::ALIASES`]) are the variable itself. Two different values for one setting in
//! one layer are an error, and so is a module that belongs to another value of an axis.
//!
//! [`files`] says where run configs, modules and `REPO_ROOT` are found.

mod builtin;
mod files;
mod scope;
mod warnings;

pub use builtin::TEMPLATES as BUILT_IN_TEMPLATES;

use super::{
    error::{ConfigError, ConfigWarning, Location},
    language::{self, Evaluation},
    settings::values::RunKind,
    variables,
};
use files::{Found, Templates};
use scope::{Layer, Scope};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::PathBuf,
    sync::Arc,
    time::SystemTime,
};

/// Name of the array that lists the template modules.
const MODULES: &str = "TEMPLATE_MODULES";

/// Prefix of overrides in the environment.
const OVERRIDE_PREFIX: &str = "LEGORL_SET_";

/// Names the site file in the environment.
pub const SITE_VARIABLE: &str = "LEGORL_SITE";

/// Names the folder of template modules in the environment.
pub const TEMPLATES_VARIABLE: &str = "LEGORL_TEMPLATES";

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A template module.
    Module(Location),
    /// The site file.
    Site(Location),
    /// The run config.
    RunConfig(Location),
    /// `LEGORL_SET_KEY`.
    Environment(String),
    /// `--set KEY=VALUE`.
    Flag(String),
    /// The program itself (`REPO_ROOT`).
    Program,
}

impl Source {
    /// Name of the layer, for machines.
    pub fn layer(&self) -> &'static str {
        match self {
            Source::Module(_) => "module",
            Source::Site(_) => "site",
            Source::RunConfig(_) => "config",
            Source::Environment(_) => "environment",
            Source::Flag(_) => "flag",
            Source::Program => "program",
        }
    }

    /// Place in a file, for values of files.
    pub fn location(&self) -> Option<&Location> {
        match self {
            Source::Module(location) | Source::Site(location) | Source::RunConfig(location) => Some(location),
            Source::Environment(_) | Source::Flag(_) | Source::Program => None,
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Module(location) | Source::Site(location) | Source::RunConfig(location) => {
                location.fmt(f)
            }
            Source::Environment(name) => write!(f, "environment {name}"),
            Source::Flag(text) => write!(f, "--set {text}"),
            Source::Program => f.write_str("legorl-rank"),
        }
    }
}

/// A value before it is typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Text after expansion.
    pub text: String,
    /// Where it comes from.
    pub source: Source,
    /// The second name under which it was set.
    pub written_as: Option<String>,
}

/// What to load.
#[derive(Clone, Debug)]
pub struct LoadRequest {
    /// What the run is for.
    pub kind: RunKind,
    /// Run config, as given.
    pub config: PathBuf,
    /// Site file, as given by `--site`; `None` leaves it to [`SITE_VARIABLE`].
    pub site: Option<PathBuf>,
    /// Folder of template modules, as given by `--templates`; `None` leaves it to [`TEMPLATES_VARIABLE`].
    pub templates: Option<PathBuf>,
    /// `--set` arguments, in order.
    pub set: Vec<String>,
    /// The process environment.
    pub environment: BTreeMap<String, String>,
    /// Working directory.
    pub cwd: PathBuf,
    /// The moment that `$(date …)` shows.
    pub now: SystemTime,
}

impl LoadRequest {
    /// A request for a training run that nothing around the file influences, at the start of 1970.
    pub fn isolated(config: impl Into<PathBuf>, cwd: impl Into<PathBuf>) -> Self {
        Self {
            kind: RunKind::Train,
            config: config.into(),
            site: None,
            templates: None,
            set: Vec::new(),
            environment: BTreeMap::new(),
            cwd: cwd.into(),
            now: SystemTime::UNIX_EPOCH,
        }
    }

    /// A request with this process's environment, directory and time.
    pub fn from_process(config: impl Into<PathBuf>, set: Vec<String>) -> Self {
        let environment = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect();
        Self {
            set,
            environment,
            now: SystemTime::now(),
            ..Self::isolated(
                config,
                std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/")),
            )
        }
    }

    fn named(&self, flag: &Option<PathBuf>, variable: &str) -> Option<PathBuf> {
        let ambient = self.environment.get(variable).filter(|text| !text.is_empty());
        flag.clone().or_else(|| ambient.map(PathBuf::from))
    }
}

/// All layers, merged.
#[derive(Clone, Debug)]
pub struct Layered {
    /// Run config, absolute.
    pub config_path: PathBuf,
    /// Site file, absolute.
    pub site_path: Option<PathBuf>,
    /// Root of relative paths.
    pub repo_root: PathBuf,
    /// Template modules in order, as written.
    pub modules: Vec<String>,
    values: BTreeMap<String, Entry>,
}

impl Layered {
    /// The entry of a variable that some layer has set.
    pub fn get(&self, name: &str) -> Option<&Entry> {
        self.values.get(variables::canonical(name))
    }

    /// Everything that some layer has set, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.values.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    /// Values of variables with secret names, for removal from whatever is shown.
    pub fn secrets(&self) -> impl Iterator<Item = &str> {
        let secret = self.values.iter().filter(|(name, _)| variables::is_secret(name));
        secret.map(|(_, entry)| entry.text.as_str())
    }
}

/// Loads and merges all layers of a run config. Errors hold no secrets.
pub fn load(request: &LoadRequest) -> Result<(Layered, Vec<ConfigWarning>), ConfigError> {
    let config_path = files::find_config(request)?;
    let site_path = files::find_site(request)?;
    let templates = files::find_templates(request, &config_path)?;
    let mut scope = Scope::new(&request.environment);
    let root = templates.repo_root.display().to_string();
    scope.lock("REPO_ROOT", root, Source::Program);
    let files = evaluate_all(request, &mut scope, &config_path, site_path.as_ref(), &templates);
    let modules = files.map_err(|error| scope.without_secrets(error))?;

    let mut found = templates.warnings.clone();
    found.append(&mut scope.warnings);
    let referred = std::mem::take(&mut scope.from_environment);
    let helpers = std::mem::take(&mut scope.referred);
    let layered = Layered {
        config_path,
        site_path,
        repo_root: templates.repo_root,
        modules: modules.iter().map(|(_, module)| module.clone()).collect(),
        values: scope.values,
    };
    warnings::axes(&layered, &modules)?;
    found.extend(warnings::names(&layered, &helpers, request.kind));
    found.extend(warnings::ambient(&layered, &request.environment, &referred));
    warnings::limit(&mut found);
    Ok((layered, found))
}

/// Runs through all files in order and returns the modules with the places that name them.
fn evaluate_all(
    request: &LoadRequest,
    scope: &mut Scope<'_>,
    config_path: &PathBuf,
    site_path: Option<&PathBuf>,
    templates: &Templates,
) -> Result<Vec<(Location, String)>, ConfigError> {
    overrides(request, scope)?;
    let run = |scope: &mut Scope<'_>, shown: PathBuf, bytes: &[u8]| -> Result<(), ConfigError> {
        let file = language::parse(Arc::new(shown), bytes)?;
        scope.start_file();
        Evaluation::new(scope, request.now).run(&file)?;
        Ok(())
    };
    if let Some(site) = site_path {
        scope.layer = Layer::Site;
        run(scope, files::shown(site, &request.cwd), &files::read(site)?)?;
    }
    scope.layer = Layer::RunConfig;
    run(scope, request.config.clone(), &files::read(config_path)?)?;
    scope.layer = Layer::Module;
    let listed = scope.modules.clone();
    let mut seen = BTreeSet::new();
    for (location, module) in &listed {
        let found = files::find_module(module, location, templates)?;
        let why = match &found {
            Found::File(path) if path == config_path => Some("the run config itself"),
            _ if !seen.insert(found.clone()) => Some("named twice"),
            _ => None,
        };
        if let Some(why) = why {
            return Err(ConfigError::ModuleCycle {
                location: location.clone(),
                module: module.clone(),
                why: why.into(),
            });
        }
        match found {
            Found::File(path) => run(scope, files::shown(&path, &request.cwd), &files::read(&path)?)?,
            Found::BuiltIn(name, text) => {
                run(scope, PathBuf::from(format!("built-in/{name}")), text.as_bytes())?
            }
        }
    }
    Ok(listed)
}

fn overrides(request: &LoadRequest, scope: &mut Scope<'_>) -> Result<(), ConfigError> {
    for (key, value) in &request.environment {
        if let Some(name) = key.strip_prefix(OVERRIDE_PREFIX) {
            override_one(scope, name, value, Source::Environment(key.clone()), key)?;
        }
    }
    for text in &request.set {
        let name = text.split('=').next().unwrap_or_default();
        let origin = format!("--set {name}");
        let problem = match text.split_once('=') {
            None => Some("write --set NAME=VALUE".to_owned()),
            Some(_) if variables::is_secret(name) => Some(format!(
                "{name} holds a secret, and every user of the machine can read command lines; \
                 put it into the environment as {OVERRIDE_PREFIX}{name}"
            )),
            Some((_, value)) => {
                override_one(scope, name, value, Source::Flag(name.to_owned()), &origin)?;
                None
            }
        };
        if let Some(problem) = problem {
            return Err(ConfigError::Override { origin, problem });
        }
    }
    Ok(())
}

fn override_one(
    scope: &mut Scope<'_>,
    name: &str,
    value: &str,
    source: Source,
    origin: &str,
) -> Result<(), ConfigError> {
    let is_name = name.starts_with(|c: char| c == '_' || c.is_ascii_alphabetic())
        && name.chars().all(|c| c == '_' || c.is_ascii_alphanumeric());
    let problem = if value.contains("${") || value.contains("$(") {
        let value = scope::shown(name, value);
        Some(format!(
            "`{value}` is taken as it stands, nothing in it is expanded: write the value itself"
        ))
    } else if !is_name {
        Some(format!("`{name}` is not a variable name"))
    } else if name == "REPO_ROOT" || name == MODULES {
        Some(format!("{name} cannot be overridden; choose another run config"))
    } else {
        scope
            .same_layer(name, value, &source)
            .map(|other| format!("contradicts {other}; keep one of them"))
    };
    match problem {
        Some(problem) => Err(ConfigError::Override {
            origin: origin.to_owned(),
            problem,
        }),
        None => {
            scope.lock(name, value.to_owned(), source);
            Ok(())
        }
    }
}
