//! Configuration: from a run config to [`Settings`], with the origin of every value.
//!
//! ```text
//! language/    text of an .env file -> values; nothing is executed
//! layers/      defaults < modules < site file < run config < LEGORL_SET_KEY < --set, with sources
//! variables/   the table of every variable
//! settings/    typed values, resolved once
//! show         `config show`
//! reference    docs/configuration.md, made from the table
//! ```
//!
//! A run has one configuration: [`load`] gives the settings, what each value came from and warnings, or
//! an error that names file, line and column. Stages receive [`Settings`] and read nothing else.

pub mod error;
pub mod language;
#[cfg(test)]
mod layer_tests;
pub mod layers;
pub mod reference;
pub mod settings;
pub mod show;
#[cfg(test)]
mod tests;
pub mod variables;

pub use error::{ConfigError, ConfigWarning, Location, WarningKind};
pub use layers::{Layered, LoadRequest, Source};
pub use settings::{values, Settings};

/// A loaded run config.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// Typed values.
    pub settings: Settings,
    /// The text of every value that some layer has set, with its source.
    pub layered: Layered,
    /// What computed defaults came to, by variable.
    pub derived: settings::Derived,
    /// The moment that `$(date …)` shows.
    pub read_at: std::time::SystemTime,
    /// What the user should know.
    pub warnings: Vec<ConfigWarning>,
}

/// Loads a run config with its modules and overrides.
pub fn load(request: &LoadRequest) -> Result<Loaded, ConfigError> {
    let (layered, warnings) = layers::load(request)?;
    let (settings, derived) = settings::resolve(&layered, request.kind)?;
    Ok(Loaded {
        settings,
        layered,
        derived,
        read_at: request.now,
        warnings,
    })
}
