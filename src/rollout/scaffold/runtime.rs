//! Runtime trees: the files of a foreign agent, made once by `setup/runtimes.sh` and mounted read-only.
//!
//! ```text
//! <LEGORL_RUNTIMES>/<agent>-<version>/
//!   runtime.manifest    what this is; a folder without it is not finished
//!   runtime.files       every regular file: size in bytes, space, path
//!   …                   the agent's files
//! ```
//!
//! The manifest is lines of `key value`:
//!
//! | Key | Value |
//! |---|---|
//! | `legorl-runtime` | format, `1`; the first line |
//! | `name`, `version` | as in the folder's name |
//! | `entry` | the agent's program, relative to the folder |
//! | `files` | number of lines of `runtime.files` |
//! | `crc32` | CRC-32 of `runtime.files`, decimal |
//!
//! Inside a sandbox the folder lies at `/opt/legorl/runtimes/<agent>-<version>`, whatever its place on the
//! host, so that a tree may hold absolute paths.
//!
//! [`Runtime::check`] compares the list with its checksum and every file's size with the list. It reads no
//! file's content: the downloads were verified when the tree was made.

use super::ScaffoldError;
use crate::base::files;
use crate::rollout::sandbox::ReadOnlyMount;
use std::fs;
use std::path::{Path, PathBuf};

/// Where runtimes lie inside a sandbox.
pub const INSIDE: &str = "/opt/legorl/runtimes";
const MANIFEST: &str = "runtime.manifest";
const FILES: &str = "runtime.files";

/// Which runtime a scaffold uses.
#[derive(Clone, Debug, Default)]
pub struct RuntimeConfig {
    /// Folder of all runtimes (`LEGORL_RUNTIMES`); [`default_root`] when absent.
    pub root: Option<PathBuf>,
    /// Version (`SCAFFOLD_VERSION`); the scaffold's pinned one when absent.
    pub version: Option<String>,
}

/// Where `setup/runtimes.sh` puts runtimes: `runtimes` below `LEGORL_CACHE`, below `legorl` in
/// `XDG_CACHE_HOME`, or in `~/.cache/legorl`. `None` without a home folder.
pub fn default_root() -> Option<PathBuf> {
    let folder = |name: &str| {
        std::env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    let cache = folder("LEGORL_CACHE")
        .or_else(|| Some(folder("XDG_CACHE_HOME")?.join("legorl")))
        .or_else(|| Some(folder("HOME")?.join(".cache/legorl")))?;
    Some(cache.join("runtimes"))
}

/// A runtime tree that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runtime {
    scaffold: &'static str,
    version: String,
    host: PathBuf,
    entry: String,
}

impl Runtime {
    /// Finds the tree of `scaffold` and reads its manifest. `pinned` is the version without
    /// [`RuntimeConfig::version`].
    pub fn find(scaffold: &'static str, pinned: &str, config: &RuntimeConfig) -> Result<Self, ScaffoldError> {
        let version = config.version.as_deref().unwrap_or(pinned);
        let wanted = if version == pinned {
            scaffold.to_owned()
        } else {
            format!("{scaffold}@{version}")
        };
        let missing = |problem: String| ScaffoldError::NotInstalled {
            scaffold,
            problem,
            fix: format!("setup/runtimes.sh {wanted}"),
        };
        let Some(root) = config.root.clone().or_else(default_root) else {
            return Err(ScaffoldError::NotInstalled {
                scaffold,
                problem: "no folder for runtimes: neither LEGORL_RUNTIMES nor HOME is set".into(),
                fix: format!("set LEGORL_RUNTIMES to a folder and run setup/runtimes.sh {wanted}"),
            });
        };
        let host = root.join(format!("{scaffold}-{version}"));
        let path = host.join(MANIFEST);
        let text = files::read_text(&path).map_err(|e| missing(format!("{}: {e}", path.display())))?;
        let value = |key: &str| {
            let mut lines = text.lines();
            lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(' '))
        };
        for (key, want) in [("legorl-runtime", "1"), ("name", scaffold), ("version", version)] {
            if value(key) != Some(want) {
                return Err(missing(format!(
                    "{}: `{key}` is `{}` and must be `{want}`",
                    path.display(),
                    value(key).unwrap_or_default()
                )));
            }
        }
        let entry = value("entry").unwrap_or_default();
        let inner =
            !entry.is_empty() && !entry.starts_with('/') && !entry.split('/').any(|part| part == "..");
        if !inner || !host.join(entry).is_file() {
            return Err(missing(format!(
                "{}: the agent's program `{entry}` is not there",
                path.display()
            )));
        }
        Ok(Self {
            scaffold,
            version: version.to_owned(),
            entry: entry.to_owned(),
            host,
        })
    }

    /// Proves that the tree is whole; see the module.
    pub fn check(&self) -> Result<(), ScaffoldError> {
        let broken = |problem: String| ScaffoldError::NotInstalled {
            scaffold: self.scaffold,
            problem,
            fix: format!(
                "remove {} and run setup/runtimes.sh {}@{}",
                self.host.display(),
                self.scaffold,
                self.version
            ),
        };
        let read = |name: &str| {
            let path = self.host.join(name);
            files::read_text(&path).map_err(|e| broken(format!("{}: {e}", path.display())))
        };
        let (manifest, files) = (read(MANIFEST)?, read(FILES)?);
        let number = |key: &str| {
            manifest
                .lines()
                .find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.parse::<u64>().ok())
        };
        let list = self.host.join(FILES);
        let (count, crc) = (files.lines().count() as u64, crc32fast::hash(files.as_bytes()));
        if number("files") != Some(count) || number("crc32") != Some(u64::from(crc)) {
            return Err(broken(format!(
                "{}: {count} files with checksum {crc}, and the manifest says otherwise",
                list.display()
            )));
        }
        for line in files.lines() {
            let parsed = line
                .split_once(' ')
                .and_then(|(size, path)| Some((size.parse::<u64>().ok()?, path)));
            let Some((size, path)) = parsed else {
                return Err(broken(format!("{}: the line `{line}`", list.display())));
            };
            let path = self.host.join(path);
            match fs::symlink_metadata(&path) {
                Ok(meta) if meta.is_file() && meta.len() == size => {}
                Ok(meta) => {
                    return Err(broken(format!(
                        "{} has {} bytes and must be a file of {size}",
                        path.display(),
                        meta.len()
                    )))
                }
                Err(e) => return Err(broken(format!("{}: {e}", path.display()))),
            }
        }
        Ok(())
    }

    /// Version of the tree.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The tree on the host.
    pub fn host(&self) -> &Path {
        &self.host
    }

    /// The tree inside a sandbox.
    pub fn inside(&self) -> String {
        format!("{INSIDE}/{}-{}", self.scaffold, self.version)
    }

    /// The agent's program inside a sandbox.
    pub fn entry(&self) -> String {
        format!("{}/{}", self.inside(), self.entry)
    }

    /// Brings the tree into a sandbox.
    pub fn mount(&self) -> ReadOnlyMount {
        ReadOnlyMount {
            host: self.host.clone(),
            inside: self.inside(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make(root: &Path, name: &str, manifest: &[(&str, &str)], files: &str) {
        let dir = root.join(name);
        fs::create_dir_all(dir.join("bin")).unwrap();
        fs::write(dir.join("bin/agent"), "12345").unwrap();
        fs::write(dir.join(FILES), files).unwrap();
        let lines: String = manifest.iter().map(|(k, v)| format!("{k} {v}\n")).collect();
        fs::write(dir.join(MANIFEST), lines).unwrap();
    }

    #[test]
    fn a_tree_is_found_by_version_and_its_damage_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let files = "5 bin/agent\n";
        let crc = crc32fast::hash(files.as_bytes()).to_string();
        let lines = |version: &'static str| {
            vec![
                ("legorl-runtime", "1"),
                ("name", "cc"),
                ("version", version),
                ("entry", "bin/agent"),
                ("files", "1"),
                ("crc32", crc.as_str()),
            ]
        };
        make(dir.path(), "cc-1.0", &lines("1.0"), files);
        make(dir.path(), "cc-2.0", &lines("2.0"), files);
        let config = |version: Option<&str>| RuntimeConfig {
            root: Some(dir.path().to_path_buf()),
            version: version.map(str::to_owned),
        };
        let pinned = Runtime::find("cc", "1.0", &config(None)).unwrap();
        assert_eq!(pinned.entry(), "/opt/legorl/runtimes/cc-1.0/bin/agent");
        assert_eq!(pinned.mount().host, dir.path().join("cc-1.0"));
        pinned.check().unwrap();
        let other = Runtime::find("cc", "1.0", &config(Some("2.0"))).unwrap();
        assert_eq!(other.version(), "2.0");

        let text = |version: Option<&str>| {
            let found = Runtime::find("cc", "1.0", &config(version)).and_then(|r| r.check());
            found.unwrap_err().to_string()
        };
        assert!(
            text(Some("3.0")).contains("setup/runtimes.sh cc@3.0"),
            "{}",
            text(Some("3.0"))
        );
        fs::write(dir.path().join("cc-1.0/bin/agent"), "123").unwrap();
        assert!(text(None).contains("has 3 bytes"), "{}", text(None));
        fs::write(dir.path().join("cc-1.0/runtime.files"), "3 bin/agent\n").unwrap();
        assert!(
            text(None).contains("the manifest says otherwise"),
            "{}",
            text(None)
        );
        fs::remove_file(dir.path().join("cc-1.0/bin/agent")).unwrap();
        assert!(text(None).contains("`bin/agent` is not there"), "{}", text(None));
        make(dir.path(), "cc-2.0", &lines("1.0"), files);
        assert!(
            text(Some("2.0")).contains("`version` is `1.0`"),
            "{}",
            text(Some("2.0"))
        );
    }
}
