//! Layers with provenance: table defaults < template modules < run config < `LEGORL_SET_KEY` in the
//! environment < `--set KEY=VALUE`.
//!
//! The run config is evaluated first, then the modules that its `TEMPLATE_MODULES` names, in order.
//! Modules set values with `: "${X:=default}"`, so they never replace a value of the run config. An
//! override is there before the first line is read and cannot be assigned to, so values that are
//! computed from it follow it.
//!
//! The plain process environment counts only where a file refers to it by `${X:-…}`, `${X:+…}`,
//! `${X:?…}`, or by a plain `${X}` of a name that is not a variable of this program (`${HOME}`,
//! `${SLURM_JOB_ID}`). An ambient `NNODES` changes nothing and is reported.
//!
//! `REPO_ROOT` is the folder that holds `configs/` (or `scripts/`): template modules are looked for in
//! `templates/` and `configs/templates/` of the run config's folder and of each of its parents, and
//! `REPO_ROOT` is the parent of the folder in which `templates/` was found. Without any, it is the
//! parent of the nearest folder named `configs`, or the run config's own folder. Relative paths in
//! values count from `REPO_ROOT`.

use super::{
    error::{ConfigError, ConfigWarning, LanguageError, Location, WarningKind},
    language::{self, Evaluation, Names, Setting},
    variables::{self, DefaultValue},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

/// Largest file that is read.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Name of the array that lists the template modules.
const MODULES: &str = "TEMPLATE_MODULES";

/// Prefix of overrides in the environment.
const OVERRIDE_PREFIX: &str = "LEGORL_SET_";

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A template module.
    Module(Location),
    /// The run config.
    RunConfig(Location),
    /// `LEGORL_SET_KEY`.
    Environment(String),
    /// `--set KEY=VALUE`.
    Flag(String),
    /// The program itself (`REPO_ROOT`).
    Program,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Module(location) | Source::RunConfig(location) => location.fmt(f),
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
}

/// What to load.
#[derive(Clone, Debug)]
pub struct LoadRequest {
    /// Run config, as given.
    pub config: PathBuf,
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
    /// A request with this process's environment, directory and time.
    pub fn from_process(config: impl Into<PathBuf>, set: Vec<String>) -> Self {
        let environment = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect();
        Self {
            config: config.into(),
            set,
            environment,
            cwd: std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/")),
            now: SystemTime::now(),
        }
    }
}

/// All layers, merged.
#[derive(Clone, Debug)]
pub struct Layered {
    /// Run config, absolute.
    pub config_path: PathBuf,
    /// Root of relative paths.
    pub repo_root: PathBuf,
    /// Template modules in order, as written.
    pub modules: Vec<String>,
    values: BTreeMap<String, Entry>,
}

impl Layered {
    /// The entry of a variable that some layer has set.
    pub fn get(&self, name: &str) -> Option<&Entry> {
        self.values.get(name)
    }

    /// Everything that some layer has set, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.values.iter().map(|(name, entry)| (name.as_str(), entry))
    }
}

/// Loads and merges all layers of a run config.
pub fn load(request: &LoadRequest) -> Result<(Layered, Vec<ConfigWarning>), ConfigError> {
    let shown = Arc::new(request.config.clone());
    let config_path = find_config(request)?;
    let (repo_root, template_root) = roots(&config_path);
    let mut scope = Scope {
        values: BTreeMap::new(),
        arrays: BTreeMap::new(),
        locked: BTreeSet::new(),
        environment: &request.environment,
        referred: BTreeSet::new(),
        defaults_read: BTreeMap::new(),
        in_module: false,
        warnings: Vec::new(),
    };
    scope.lock("REPO_ROOT", repo_root.display().to_string(), Source::Program);
    overrides(request, &mut scope)?;

    run_file(&mut scope, request.now, shown, &config_path)?;
    scope.in_module = true;
    let listed = scope.arrays.get(MODULES).cloned().unwrap_or_default();
    let mut seen = BTreeSet::from([config_path.clone()]);
    for (location, module) in &listed {
        let path = find_module(module, location, &config_path, template_root.as_deref())?;
        if !seen.insert(path.clone()) {
            let why = if path == config_path {
                "the run config itself"
            } else {
                "named twice"
            };
            return Err(ConfigError::ModuleCycle {
                location: location.clone(),
                module: module.clone(),
                why: why.into(),
            });
        }
        run_file(
            &mut scope,
            request.now,
            Arc::new(shown_path(&path, &request.cwd)),
            &path,
        )?;
    }

    let mut warnings = scope.warnings;
    let layered = Layered {
        config_path,
        repo_root,
        modules: listed.into_iter().map(|(_, module)| module).collect(),
        values: scope.values,
    };
    warnings.extend(name_warnings(&layered));
    warnings.extend(ambient_warnings(&layered, &request.environment, &scope.referred));
    Ok((layered, warnings))
}

fn find_config(request: &LoadRequest) -> Result<PathBuf, ConfigError> {
    let joined = request.cwd.join(&request.config);
    let not_found = || ConfigError::NotFound {
        given: request.config.display().to_string(),
        tried: joined.display().to_string(),
        cwd: request.cwd.display().to_string(),
    };
    let path = match joined.canonicalize() {
        Ok(path) => path,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(not_found()),
        Err(source) => {
            return Err(ConfigError::Read {
                path: joined.display().to_string(),
                source,
            })
        }
    };
    Ok(path)
}

/// Repository root and template folder of a run config.
fn roots(config: &Path) -> (PathBuf, Option<PathBuf>) {
    for folder in config.ancestors().skip(1) {
        for templates in [folder.join("templates"), folder.join("configs/templates")] {
            if templates.is_dir() {
                let holder = templates.parent().unwrap_or(folder);
                let root = holder.parent().unwrap_or(holder).to_path_buf();
                return (root, Some(templates));
            }
        }
    }
    let own = config.parent().unwrap_or(Path::new("/"));
    let configs = config
        .ancestors()
        .skip(1)
        .find(|f| f.file_name().is_some_and(|n| n == "configs"));
    let root = configs.and_then(Path::parent).unwrap_or(own);
    (root.to_path_buf(), None)
}

fn find_module(
    module: &str,
    location: &Location,
    config: &Path,
    template_root: Option<&Path>,
) -> Result<PathBuf, ConfigError> {
    let own = config.parent().unwrap_or(Path::new("/"));
    let candidates: Vec<PathBuf> = match template_root {
        _ if Path::new(module).is_absolute() => vec![PathBuf::from(module)],
        Some(root) => vec![root.join(module)],
        None => vec![
            own.join("templates").join(module),
            own.join("configs/templates").join(module),
        ],
    };
    for candidate in &candidates {
        if let Ok(path) = candidate.canonicalize() {
            if path.is_file() {
                return Ok(path);
            }
        }
    }
    Err(ConfigError::ModuleNotFound {
        location: location.clone(),
        module: module.to_owned(),
        tried: candidates.iter().map(|path| path.display().to_string()).collect(),
    })
}

/// Paths below the working directory are shown relative to it, as the user would type them.
fn shown_path(path: &Path, cwd: &Path) -> PathBuf {
    path.strip_prefix(cwd).unwrap_or(path).to_path_buf()
}

fn run_file(
    scope: &mut Scope<'_>,
    now: SystemTime,
    shown: Arc<PathBuf>,
    path: &Path,
) -> Result<(), ConfigError> {
    let read = |source| ConfigError::Read {
        path: path.display().to_string(),
        source,
    };
    let bytes = std::fs::metadata(path).map_err(read)?.len();
    if bytes > MAX_FILE_BYTES {
        return Err(ConfigError::TooLarge {
            path: path.display().to_string(),
            bytes,
            limit: MAX_FILE_BYTES,
        });
    }
    let file = language::parse(shown, &std::fs::read(path).map_err(read)?)?;
    Evaluation { names: scope, now }.run(&file)?;
    Ok(())
}

fn overrides(request: &LoadRequest, scope: &mut Scope<'_>) -> Result<(), ConfigError> {
    for (key, value) in &request.environment {
        if let Some(name) = key.strip_prefix(OVERRIDE_PREFIX) {
            override_one(scope, name, value, Source::Environment(key.clone()), key)?;
        }
    }
    for text in &request.set {
        let origin = format!("--set {}", text.split('=').next().unwrap_or_default());
        let Some((name, value)) = text.split_once('=') else {
            return Err(ConfigError::Override {
                origin,
                problem: "write --set NAME=VALUE".into(),
            });
        };
        override_one(scope, name, value, Source::Flag(name.to_owned()), &origin)?;
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
    if value.contains("${") || value.contains("$(") {
        return Err(ConfigError::Override {
            origin: origin.to_owned(),
            problem: format!(
                "`{value}` is taken as it stands, nothing in it is expanded: write the value itself"
            ),
        });
    }
    let is_name = name.starts_with(|c: char| c == '_' || c.is_ascii_alphabetic())
        && name.chars().all(|c| c == '_' || c.is_ascii_alphanumeric());
    let problem = if !is_name {
        Some(format!("`{name}` is not a variable name"))
    } else if name == "REPO_ROOT" || name == MODULES {
        Some(format!("{name} cannot be overridden; choose another run config"))
    } else {
        None
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

fn name_warnings(layered: &Layered) -> Vec<ConfigWarning> {
    let mut warnings = Vec::new();
    for (name, entry) in layered.iter() {
        if name == "REPO_ROOT" || variables::find(name).is_some() {
            continue;
        }
        if let Some(inert) = variables::no_effect(name) {
            warnings.push(ConfigWarning {
                kind: WarningKind::NoEffect,
                text: format!("{}: {name} has no effect. {}", entry.source, inert.reason),
            });
            continue;
        }
        let hint = match variables::nearest(name) {
            Some(near) => format!("did you mean {near}?"),
            None => "no variable has a similar name; docs/configuration.md lists all".to_owned(),
        };
        warnings.push(ConfigWarning {
            kind: WarningKind::UnknownVariable,
            text: format!("{}: unknown variable {name}; {hint}", entry.source),
        });
    }
    warnings
}

fn ambient_warnings(
    layered: &Layered,
    environment: &BTreeMap<String, String>,
    referred: &BTreeSet<String>,
) -> Vec<ConfigWarning> {
    let ambient = variables::all().filter(|v| !referred.contains(v.name));
    let differing = ambient.filter_map(|variable| {
        let outside = environment.get(variable.name)?;
        let inside = match (layered.get(variable.name), variable.default) {
            (Some(entry), _) => entry.text.as_str(),
            (None, DefaultValue::Value(text)) => text,
            (None, _) => "",
        };
        (outside != inside).then_some(variable.name)
    });
    differing
        .map(|name| ConfigWarning {
            kind: WarningKind::AmbientIgnored,
            text: format!(
                "{name} in the environment differs from the configuration and is not used; \
                 {OVERRIDE_PREFIX}{name} would override it"
            ),
        })
        .collect()
}

struct Scope<'a> {
    values: BTreeMap<String, Entry>,
    arrays: BTreeMap<String, Vec<(Location, String)>>,
    /// Overridden names; assignments to them have no effect.
    locked: BTreeSet<String>,
    environment: &'a BTreeMap<String, String>,
    /// Names that a file has looked up in the environment.
    referred: BTreeSet<String>,
    /// Table defaults that a file has used in an expression, and where.
    defaults_read: BTreeMap<String, (Location, String)>,
    in_module: bool,
    warnings: Vec<ConfigWarning>,
}

impl Scope<'_> {
    fn lock(&mut self, name: &str, text: String, source: Source) {
        self.values.insert(name.to_owned(), Entry { text, source });
        self.locked.insert(name.to_owned());
    }
}

impl Names for Scope<'_> {
    fn configured(&self, name: &str) -> Option<String> {
        self.values.get(name).map(|entry| entry.text.clone())
    }

    fn fallback(&mut self, name: &str, location: &Location) -> Option<String> {
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

    fn environment(&self, name: &str) -> Option<String> {
        self.environment.get(name).cloned()
    }

    fn is_array(&self, name: &str) -> bool {
        self.arrays.contains_key(name)
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
            Setting::Array(_) if name == MODULES && self.in_module => refuse(
                "a template module cannot name further modules",
                "list all modules in the run config",
            ),
            Setting::Array(_) if name != MODULES => refuse(
                "only TEMPLATE_MODULES is a list",
                "write one value, in quotes if it holds blanks",
            ),
            Setting::Array(items) => {
                self.arrays.insert(name.to_owned(), items);
                Ok(())
            }
            Setting::Text(text) => {
                if self.locked.contains(name) {
                    return Ok(());
                }
                if let Some((place, used)) = self.defaults_read.get(name).filter(|(_, used)| *used != text) {
                    self.warnings.push(ConfigWarning {
                        kind: WarningKind::ReadBeforeSet,
                        text: format!(
                            "{location}: {name} becomes `{text}` after its default `{used}` was used at {place}"
                        ),
                    });
                }
                let source = if self.in_module {
                    Source::Module(location.clone())
                } else {
                    Source::RunConfig(location.clone())
                };
                self.values.insert(name.to_owned(), Entry { text, source });
                Ok(())
            }
        }
    }
}
