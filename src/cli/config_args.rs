//! Arguments of every command that reads a run config.

use super::exec;
use crate::{
    config::{self, values::RunKind, ConfigError, LoadRequest, Loaded},
    observe::Redactor,
};
use clap::Args;
use std::path::PathBuf;

/// A run config and what is laid over it.
#[derive(Args)]
pub struct ConfigArgs {
    /// Run config
    #[arg(value_name = "CONFIG")]
    pub config: PathBuf,
    /// Override a variable; may be given several times
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = assignment)]
    pub set: Vec<String>,
    /// Site file: values of this cluster, below the run config; LEGORL_SITE names one as well
    #[arg(long, value_name = "FILE")]
    pub site: Option<PathBuf>,
    /// Folder of template modules; LEGORL_TEMPLATES names one as well
    #[arg(long, value_name = "DIR")]
    pub templates: Option<PathBuf>,
}

/// The form alone: whether the variable exists and takes the value is for the configuration to say.
fn assignment(text: &str) -> Result<String, String> {
    match text.split_once('=') {
        Some((name, _)) if !name.trim().is_empty() => Ok(text.to_owned()),
        _ => Err("write --set NAME=VALUE".into()),
    }
}

impl ConfigArgs {
    /// Loads it for this process. From then on its secrets are removed from everything that is printed.
    pub fn load(&self, kind: RunKind) -> Result<Loaded, ConfigError> {
        let loaded = config::load(&self.request(kind))?;
        for secret in loaded.layered.secrets() {
            Redactor::global().add(secret);
        }
        Ok(loaded)
    }

    /// The request for this process; [`Self::load`] is what commands want.
    pub fn request(&self, kind: RunKind) -> LoadRequest {
        let request = LoadRequest::from_process(&self.config, self.set.clone());
        LoadRequest {
            kind,
            site: self.site.clone(),
            templates: self.templates.clone(),
            // A name with `$(date …)` in it must be the one that was printed and checked.
            now: exec::moment_of_the_first_program().unwrap_or(request.now),
            ..request
        }
    }

    /// The flags as words, without the run config, for a command line that does the same.
    pub fn to_words(&self) -> Vec<String> {
        let mut words = Vec::new();
        for text in &self.set {
            words.extend(["--set".to_owned(), text.clone()]);
        }
        for (flag, path) in [("--site", &self.site), ("--templates", &self.templates)] {
            if let Some(path) = path {
                words.extend([flag.to_owned(), path.display().to_string()]);
            }
        }
        words
    }
}
