//! What a sandbox sees as its file system.
//!
//! Without `SANDBOX_ROOTFS` the root is a private folder with the system folders of this machine bound
//! into it read-only: `/usr`, `/bin`, `/sbin`, `/lib*`. Of `/etc` only what programs need and what holds
//! no secrets ([`ETC`]) is there, as links to a copy that all sandboxes of a backend share. Everything
//! else (`/tmp`, `/root`, `/app`, `/logs`, `/var`, …) begins empty and is writable.
//! With `SANDBOX_ROOTFS` the root is that tree, and what is written goes to a private overlay.
//!
//! Few binds and few folders, since each costs a start up to half a millisecond.
//!
//! Invariant: no home folder, task, run folder or other mount of the machine is visible.

use super::instance::Folder;
use crate::rollout::sandbox::{SandboxError, SandboxSpec};
use std::fs;
use std::os::unix::fs::{symlink, DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Top-level folders of a system.
const SYSTEM: [&str; 7] = ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"];
/// Where the shared copy of `/etc` is bound.
const SHARED_ETC: &str = "/run/legorl/etc";
/// Parts of `/etc` that hold no secrets: loader, alternatives, certificates, time zone, names of ports.
pub const ETC: [&str; 14] = [
    "alternatives",
    "ca-certificates.conf",
    "crypto-policies",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "magic",
    "mime.types",
    "pki/ca-trust",
    "pki/tls/certs",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
];
/// Folders that every sandbox has.
const FOLDERS: [&str; 16] = [
    "app",
    "dev",
    "etc",
    "home",
    "logs/agent",
    "logs/artifacts",
    "logs/verifier",
    "mnt",
    "opt",
    "proc",
    "root",
    "run/legorl",
    "srv",
    "usr",
    "var/log",
    "var/lib",
];
const OPEN_FOLDERS: [&str; 2] = ["tmp", "var/tmp"];
const FILES: [(&str, &str); 5] = [
    (
        "etc/passwd",
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    ),
    ("etc/group", "root:x:0:\nnogroup:x:65534:\n"),
    ("etc/hosts", "127.0.0.1 localhost sandbox\n::1 localhost\n"),
    ("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n"),
    ("etc/resolv.conf", ""),
];

/// A prepared root.
#[derive(Debug)]
pub struct Root {
    /// Folder that becomes `/` of the namespace.
    pub base: PathBuf,
    /// Read-only binds: source, and path in the namespace.
    pub binds: Vec<(PathBuf, String)>,
    /// The first process is to lay an overlay over `/lower` and make it its root.
    pub overlay: bool,
}

impl Root {
    /// Makes the private folder; `etc` is what [`copy_etc`] made.
    pub fn prepare(folder: &Folder, etc: &Path, rootfs: Option<&Path>) -> Result<Self, SandboxError> {
        let base = folder.path().join("root");
        match rootfs {
            None => host_root(base, etc),
            Some(tree) => tree_root(base, tree),
        }
    }
}

fn host_root(base: PathBuf, etc: &Path) -> Result<Root, SandboxError> {
    make_missing(&base, None)?;
    make_dir(&base.join("run/legorl/etc"), 0o755)?;
    let mut binds = vec![(etc.to_path_buf(), SHARED_ETC.to_string())];
    let link = |target: PathBuf, path: PathBuf| {
        symlink(target, &path).map_err(|e| SandboxError::io("create the link", path, e))
    };
    for name in SYSTEM {
        let host = Path::new("/").join(name);
        let Ok(meta) = fs::symlink_metadata(&host) else {
            continue;
        };
        if meta.is_symlink() {
            let target = fs::read_link(&host).map_err(|e| SandboxError::io("read", &host, e))?;
            link(target, base.join(name))?;
        } else {
            binds.push((host, format!("/{name}")));
        }
    }
    let mut linked = Vec::new();
    for name in ETC {
        // One link for all that is below a folder such as `ssl`.
        let top = name.split('/').next().unwrap_or(name);
        if !linked.contains(&top) && fs::symlink_metadata(etc.join(top)).is_ok() {
            link(Path::new(SHARED_ETC).join(top), base.join("etc").join(top))?;
            linked.push(top);
        }
    }
    Ok(Root {
        base,
        binds,
        overlay: false,
    })
}

/// The tree is the lower side of an overlay whose upper side lies in `base`.
fn tree_root(base: PathBuf, tree: &Path) -> Result<Root, SandboxError> {
    if !tree.is_dir() {
        let missing = std::io::Error::from(std::io::ErrorKind::NotFound);
        return Err(SandboxError::io("use SANDBOX_ROOTFS", tree, missing));
    }
    make_missing(&base.join("layer/upper"), Some(tree))?;
    for name in ["lower", "layer/work", "new", "proc", "dev", "run/legorl"] {
        make_dir(&base.join(name), 0o755)?;
    }
    Ok(Root {
        base,
        binds: vec![(tree.to_path_buf(), "/lower".into())],
        overlay: true,
    })
}

/// Makes the folders and files that every sandbox has, but for those that the tree brings.
fn make_missing(root: &Path, tree: Option<&Path>) -> Result<(), SandboxError> {
    let missing = |name: &str| tree.is_none_or(|t| fs::symlink_metadata(t.join(name)).is_err());
    make_dir(root, 0o755)?;
    for name in FOLDERS.into_iter().filter(|name| missing(name)) {
        make_dir(&root.join(name), 0o755)?;
    }
    for name in OPEN_FOLDERS.into_iter().filter(|name| missing(name)) {
        make_dir(&root.join(name), 0o1777)?;
    }
    for (name, text) in FILES.into_iter().filter(|(name, _)| missing(name)) {
        let path = root.join(name);
        if let Some(parent) = path.parent() {
            make_dir(parent, 0o755)?;
        }
        fs::write(&path, text).map_err(|e| SandboxError::io("write", path, e))?;
    }
    Ok(())
}

/// Copies [`ETC`] of this machine. What cannot be read by this user is left out.
pub fn copy_etc(to: &Path) -> Result<(), SandboxError> {
    make_dir(to, 0o755)?;
    for name in ETC {
        let target = to.join(name);
        if let Some(parent) = target.parent() {
            make_dir(parent, 0o755)?;
        }
        copy_readable(&Path::new("/etc").join(name), &target)?;
    }
    // Folders of this machine that turned out to be empty would hide nothing but the fact.
    for name in ["ssl", "pki/tls", "pki"] {
        fs::remove_dir(to.join(name)).ok();
    }
    Ok(())
}

fn copy_readable(from: &Path, to: &Path) -> Result<(), SandboxError> {
    let failed = |e| SandboxError::io("copy", from, e);
    let Ok(meta) = fs::symlink_metadata(from) else {
        return Ok(());
    };
    if meta.is_symlink() {
        let target = fs::read_link(from).map_err(failed)?;
        symlink(target, to).map_err(failed)
    } else if meta.is_dir() {
        make_dir(to, 0o755)?;
        for entry in fs::read_dir(from).into_iter().flatten().flatten() {
            copy_readable(&entry.path(), &to.join(entry.file_name()))?;
        }
        Ok(())
    } else {
        match fs::copy(from, to) {
            Err(e) if e.kind() != std::io::ErrorKind::PermissionDenied => Err(failed(e)),
            _ => Ok(()),
        }
    }
}

fn make_dir(path: &Path, mode: u32) -> Result<(), SandboxError> {
    let failed = |e| SandboxError::io("create the folder", path, e);
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o755).create(path).map_err(failed)?;
    if mode != 0o755 {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(failed)?;
    }
    Ok(())
}

/// Refuses a task or state folder that every sandbox would see.
pub fn check_hidden(spec: &SandboxSpec, state: &Path) -> Result<(), SandboxError> {
    let named = [
        ("the task's environment", spec.environment.as_deref()),
        ("the state folder", Some(state)),
    ];
    for (what, path) in named.into_iter().filter_map(|(w, p)| Some((w, p?))) {
        let real = path
            .canonicalize()
            .map_err(|e| SandboxError::io("find", path, e))?;
        let visible = SYSTEM.iter().any(|name| {
            let folder = Path::new("/").join(name);
            real.starts_with(folder.canonicalize().unwrap_or(folder))
        });
        if visible {
            return Err(SandboxError::Spec {
                name: spec.name.clone(),
                problem: format!(
                    "{what} `{}` lies in a system folder, which every sandbox can read; move it",
                    real.display()
                ),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_in_system_folders_are_refused() {
        let state = tempfile::tempdir().unwrap();
        let mut spec = SandboxSpec::new("s");
        check_hidden(&spec, state.path()).unwrap();
        spec.environment = Some("/usr/share".into());
        let text = check_hidden(&spec, state.path()).unwrap_err().to_string();
        assert!(text.contains("/usr/share"), "{text}");
        spec.environment = Some("/no/such/task".into());
        assert!(check_hidden(&spec, state.path()).is_err());
    }
}
