//! Where run configs, site files and template modules are found.
//!
//! Template modules are looked for in the folder of `--templates` (or `LEGORL_TEMPLATES`); without one, in
//! `templates/` or `configs/templates/` of the run config's folder or of the nearest of its parents that
//! has one; and then among the modules that are built into the program, which are those of
//! `configs/templates/`. So a run config works from any folder.
//!
//! `REPO_ROOT`, from which relative paths count, is the folder that holds `configs/` (or `scripts/`): the
//! parent of the folder in which `templates/` was found; without any, the parent of the nearest folder
//! named `configs`, or the run config's own folder.
//!
//! The original keeps its modules in `scripts/templates/`. They hold commands, which nothing here runs, so
//! that folder only tells where `REPO_ROOT` is; a warning says so.

use super::{builtin, LoadRequest, SITE_VARIABLE, TEMPLATES_VARIABLE};
use crate::base::files;
use crate::config::error::{ConfigError, ConfigWarning, Location, WarningKind};
use std::{
    io::{self, Read},
    path::{Path, PathBuf},
};

/// Largest file that is read.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// A template module.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Found {
    File(PathBuf),
    /// Name and text.
    BuiltIn(&'static str, &'static str),
}

/// Where modules are looked for.
pub(super) struct Templates {
    pub repo_root: PathBuf,
    folder: Option<PathBuf>,
    /// A folder that is not read.
    foreign: Option<PathBuf>,
    pub warnings: Vec<ConfigWarning>,
}

pub(super) fn find_config(request: &LoadRequest) -> Result<PathBuf, ConfigError> {
    let joined = request.cwd.join(&request.config);
    match joined.canonicalize() {
        Ok(path) => Ok(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(ConfigError::NotFound {
            given: request.config.display().to_string(),
            tried: joined.display().to_string(),
            cwd: request.cwd.display().to_string(),
            near: near(&joined).map(|name| request.config.with_file_name(name).display().to_string()),
        }),
        Err(error) => Err(ConfigError::Read {
            path: joined.display().to_string(),
            error,
        }),
    }
}

/// The file of the same folder whose name is nearest to that of a missing one.
fn near(missing: &Path) -> Option<String> {
    const MAX_FILES: usize = 1000;
    let wanted = missing.file_name()?.to_str()?;
    let entries = std::fs::read_dir(missing.parent()?).ok()?.take(MAX_FILES);
    entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .map(|name| (strsim::damerau_levenshtein(&name, wanted), name))
        .min()
        .filter(|(distance, _)| *distance <= 2)
        .map(|(_, name)| name)
}

pub(super) fn find_site(request: &LoadRequest) -> Result<Option<PathBuf>, ConfigError> {
    let Some(given) = request.named(&request.site, SITE_VARIABLE) else {
        return Ok(None);
    };
    let joined = request.cwd.join(&given);
    match joined.canonicalize() {
        Ok(path) => Ok(Some(path)),
        Err(error) => Err(ConfigError::Named {
            what: "site file",
            by: by(&request.site, "--site", SITE_VARIABLE),
            path: joined.display().to_string(),
            error,
        }),
    }
}

fn by(flag: &Option<PathBuf>, option: &str, variable: &str) -> String {
    match flag {
        Some(_) => option.to_owned(),
        None => format!("{variable} in the environment"),
    }
}

pub(super) fn find_templates(request: &LoadRequest, config: &Path) -> Result<Templates, ConfigError> {
    let (repo_root, near) = roots(config);
    let mut templates = Templates {
        repo_root,
        folder: near,
        foreign: None,
        warnings: Vec::new(),
    };
    if let Some(given) = request.named(&request.templates, TEMPLATES_VARIABLE) {
        let joined = request.cwd.join(&given);
        let folder = joined.canonicalize().and_then(|path| match path.is_dir() {
            true => Ok(path),
            false => Err(io::Error::other("it is not a folder")),
        });
        let folder = folder.map_err(|error| ConfigError::Named {
            what: "folder of template modules",
            by: by(&request.templates, "--templates", TEMPLATES_VARIABLE),
            path: joined.display().to_string(),
            error,
        })?;
        templates.folder = Some(folder);
    } else if let Some(folder) = templates.folder.take_if(|folder| is_of_the_original(folder)) {
        templates.warnings.push(ConfigWarning {
            kind: WarningKind::ForeignTemplates,
            text: format!(
                "{} belongs to the original and holds commands, which are not run; the modules of the same \
                 names that are built into legorl-rank are used (--templates DIR chooses others)",
                folder.display()
            ),
        });
        templates.foreign = Some(folder);
    }
    Ok(templates)
}

fn is_of_the_original(templates: &Path) -> bool {
    templates
        .parent()
        .and_then(Path::file_name)
        .is_some_and(|name| name == "scripts")
        && templates.join("verl/common.env").is_file()
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

pub(super) fn find_module(
    module: &str,
    location: &Location,
    templates: &Templates,
) -> Result<Found, ConfigError> {
    let mut tried = Vec::new();
    let candidate = match &templates.folder {
        _ if Path::new(module).is_absolute() => Some(PathBuf::from(module)),
        Some(folder) => Some(folder.join(module)),
        None => None,
    };
    if let Some(candidate) = &candidate {
        match candidate.canonicalize() {
            Ok(path) if path.is_file() => return Ok(Found::File(path)),
            _ => tried.push(candidate.display().to_string()),
        }
    }
    if let Some((name, text)) = builtin::find(module) {
        return Ok(Found::BuiltIn(name, text));
    }
    if module.ends_with(',') {
        tried.push("blanks separate the modules of a list, not commas".to_owned());
    }
    if let Some(foreign) = &templates.foreign {
        tried.push(format!(
            "not in {}, which belongs to the original",
            foreign.display()
        ));
    }
    tried.push(format!(
        "the modules that are built into legorl-rank: {}",
        builtin::alike(module)
    ));
    Err(ConfigError::ModuleNotFound {
        location: location.clone(),
        module: module.to_owned(),
        tried,
    })
}

/// Paths below the working directory are shown relative to it, as the user would type them.
pub(super) fn shown(path: &Path, cwd: &Path) -> PathBuf {
    path.strip_prefix(cwd).unwrap_or(path).to_path_buf()
}

/// The bytes of a file of ordinary size. Devices and pipes are refused: they may never end.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, ConfigError> {
    let fail = |error| ConfigError::Read {
        path: path.display().to_string(),
        error,
    };
    let mut bytes = Vec::new();
    let mut file = files::open(path).map_err(fail)?;
    let size = file.metadata().map_err(fail)?.len();
    (&mut file)
        .take(MAX_FILE_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(fail)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(ConfigError::TooLarge {
            path: path.display().to_string(),
            bytes: size,
            limit: MAX_FILE_BYTES,
        });
    }
    Ok(bytes)
}
