//! Replacing this program by the one that links libtorch. The process stays the same, so Slurm and
//! PMIx notice nothing.

use anyhow::{bail, Context};
use std::{
    os::unix::process::CommandExt,
    path::PathBuf,
    process::Command,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Set for the second program: rank 0 has printed the configuration and the checks already.
pub const SHOWN: &str = "LEGORL_CHECKS_SHOWN";

/// When the first program read the configuration, in seconds since 1970.
const MOMENT: &str = "LEGORL_CHECKED_AT";

/// The moment at which the program that this one replaced read the configuration.
pub fn moment_of_the_first_program() -> Option<SystemTime> {
    std::env::var_os(SHOWN)?;
    let seconds = std::env::var(MOMENT).ok()?.parse::<f64>().ok()?;
    Duration::try_from_secs_f64(seconds)
        .ok()
        .and_then(|since| UNIX_EPOCH.checked_add(since))
}

/// Path of a program beside this one.
pub fn beside(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("the path of this program is unknown")?;
    let path = own.with_file_name(name);
    if !path.is_file() {
        bail!(
            "{} is missing: this command needs tensors, and `{name}` must lie beside `{}`; \
             `cargo build --release` builds both",
            path.display(),
            own.file_name().unwrap_or_default().to_string_lossy(),
        );
    }
    Ok(path)
}

/// Runs `name` with the arguments of this process in its place; `read_at` is when the configuration was
/// read. Returns only on failure.
pub fn replace(name: &str, read_at: SystemTime) -> anyhow::Error {
    let path = match beside(name) {
        Ok(path) => path,
        Err(error) => return error,
    };
    let mut command = Command::new(&path);
    command.args(std::env::args_os().skip(1)).env(SHOWN, "1");
    if let Ok(since) = read_at.duration_since(UNIX_EPOCH) {
        command.env(MOMENT, format!("{:.6}", since.as_secs_f64()));
    }
    // Idle OpenMP threads of libtorch spin by default and take the cores from engine, proxy and sandboxes.
    // libgomp reads this when it is loaded, so it cannot be set later.
    if std::env::var_os("OMP_WAIT_POLICY").is_none() {
        command.env("OMP_WAIT_POLICY", "passive");
    }
    let error = command.exec();
    anyhow::Error::new(error).context(format!("cannot start {}", path.display()))
}
