//! Arguments of every command that reads a run config.

use crate::config::{values::RunKind, LoadRequest};
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
    /// The request to load it for this process.
    pub fn request(&self, kind: RunKind) -> LoadRequest {
        LoadRequest {
            kind,
            site: self.site.clone(),
            templates: self.templates.clone(),
            ..LoadRequest::from_process(&self.config, self.set.clone())
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
