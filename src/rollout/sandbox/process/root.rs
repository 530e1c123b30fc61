//! What a sandbox sees as its file system.
//!
//! Without `SANDBOX_ROOTFS` the root holds the system folders of this machine, read-only (`/usr`, `/bin`,
//! `/sbin`, `/lib*`), of `/etc` a copy of what programs need and what holds no secrets ([`ETC`]), and
//! empty folders (`/tmp`, `/root`, `/app`, `/logs`, `/var`, …). With it the root is that tree. In both cases
//! the root can be written, and what is written is private to the sandbox and goes with it.
//!
//! | [`Layout`] | A new sandbox makes | Used |
//! |---|---|---|
//! | overlay | an empty upper layer over a lower one that all sandboxes of a backend share | where the kernel permits it (Linux 5.11, a state folder that can be an upper layer) |
//! | folders | all folders anew; `/etc` as links into a shared, read-only copy | elsewhere; not with `SANDBOX_ROOTFS` |
//!
//! Few folders and few binds, since each may cost a start milliseconds.
//!
//! Invariant: no home folder, task, run folder or other mount of the machine is visible.

use super::instance::{Folder, Instance};
use crate::rollout::sandbox::{ReadOnlyMount, SandboxError, SandboxSpec};
use legorl_agent::protocol::{HELPER_PATH, PROXY_SOCKET_PATH};
use std::fs;
use std::os::unix::fs::{symlink, DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Top-level folders of a system.
const SYSTEM: [&str; 7] = ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"];
/// Where the shared copy of `/etc` is bound.
const SHARED_ETC: &str = "/run/legorl/etc";
/// Parts of `/etc` that hold no secrets: loader, certificates, time zone, names of ports.
pub const ETC: [&str; 12] = [
    "crypto-policies",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "magic",
    "mime.types",
    "pki/ca-trust/extracted/pem",
    "pki/tls/certs",
    "services",
    "ssl/certs/ca-certificates.crt",
    "ssl/openssl.cnf",
];
/// Hundreds of links, cheaper to bind than to copy: which program stands behind a name.
const ALTERNATIVES: &str = "etc/alternatives";
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

/// How the private part of a root is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// An overlay that the first process mounts.
    Overlay,
    /// Plain folders.
    Folders {
        /// Why there is no overlay.
        because: String,
    },
}

/// What all sandboxes of a backend share.
#[derive(Debug)]
pub struct Base {
    layout: Layout,
    rootfs: Option<PathBuf>,
    /// Overlay: the first root, with the shared layer in `lower`. Folders: the shared `/etc`.
    path: PathBuf,
    /// System folders to bind, and links in their places.
    system: Vec<(String, Option<PathBuf>)>,
}

/// The root of one sandbox.
#[derive(Debug)]
pub struct Root {
    /// Folder that becomes `/` of the namespace.
    pub base: PathBuf,
    /// Only the overlay is written.
    pub read_only: bool,
    /// Binds: source, path in the namespace, writable.
    pub binds: Vec<(PathBuf, String, bool)>,
    /// The first process lays an overlay over `/lower` and makes it its root.
    pub overlay: bool,
    /// What it takes along from the first root.
    pub carried: Vec<String>,
    /// Mounts of the specification: place in the first root, place in the sandbox. Without an overlay both
    /// are the same.
    pub mounts: Vec<(String, String)>,
}

impl Base {
    /// Makes the shared part.
    pub fn create(instance: &Instance, layout: Layout, rootfs: Option<&Path>) -> Result<Self, SandboxError> {
        if let Some(tree) = rootfs.filter(|t| !t.is_dir()) {
            let missing = std::io::Error::from(std::io::ErrorKind::NotFound);
            return Err(SandboxError::io("use SANDBOX_ROOTFS", tree, missing));
        }
        let name = match layout {
            Layout::Overlay => ".base",
            Layout::Folders { .. } => ".etc",
        };
        let base = Self {
            layout,
            rootfs: rootfs.map(Path::to_path_buf),
            path: instance.path().join(name),
            system: if rootfs.is_some() {
                Vec::new()
            } else {
                system_folders()?
            },
        };
        match base.layout {
            Layout::Overlay => base.make_first_root()?,
            Layout::Folders { .. } => copy_etc(&base.path)?,
        }
        Ok(base)
    }

    /// How roots are made.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Makes the private part of a sandbox.
    pub fn root(&self, folder: &Folder, mounts: &[ReadOnlyMount]) -> Result<Root, SandboxError> {
        let mut root = match self.layout {
            Layout::Overlay => self.overlay_root(folder),
            Layout::Folders { .. } => self.folder_root(folder),
        }?;
        for (number, mount) in mounts.iter().enumerate() {
            // The first root of an overlay is shared and cannot get new places; the layer is private.
            let place = if root.overlay {
                format!("/layer/mounts/{number}")
            } else {
                mount.inside.clone()
            };
            root.binds.push((mount.host.clone(), place.clone(), false));
            root.mounts.push((place, mount.inside.clone()));
        }
        Ok(root)
    }

    /// Every place that bubblewrap covers must be there, since the first root is not written.
    fn make_first_root(&self) -> Result<(), SandboxError> {
        for name in ["dev", "layer", "lower", "new", "proc", "run/legorl"] {
            make_dir(&self.path.join(name), 0o755)?;
        }
        for (name, link) in &self.system {
            if link.is_none() {
                make_dir(&self.path.join(name), 0o755)?;
            }
        }
        let lower = self.path.join("lower");
        let mut roots = vec![self.path.as_path()];
        if self.rootfs.is_none() {
            make_missing(&lower, None)?;
            copy_etc(&lower.join("etc"))?;
            self.link_system(&lower)?;
            roots.push(&lower);
        }
        for root in roots {
            for name in [HELPER_PATH, PROXY_SOCKET_PATH] {
                let path = root.join(name.trim_start_matches('/'));
                fs::write(&path, "").map_err(|e| SandboxError::io("write", path, e))?;
            }
        }
        Ok(())
    }

    fn overlay_root(&self, folder: &Folder) -> Result<Root, SandboxError> {
        let layer = folder.path().join("layer");
        for name in ["upper", "work"] {
            make_dir(&layer.join(name), 0o755)?;
        }
        let mut binds = vec![(layer.clone(), "/layer".to_string(), true)];
        if let Some(tree) = &self.rootfs {
            make_missing(&layer.join("upper"), Some(tree))?;
            binds.push((tree.clone(), "/lower".into(), false));
        }
        let mut carried = ["proc", "dev"].map(str::to_string).to_vec();
        for (name, _) in self.system.iter().filter(|(_, link)| link.is_none()) {
            binds.push((Path::new("/").join(name), format!("/{name}"), false));
            carried.push(name.clone());
        }
        carried.push(HELPER_PATH.trim_start_matches('/').into());
        Ok(Root {
            base: self.path.clone(),
            read_only: true,
            binds,
            overlay: true,
            carried,
            mounts: Vec::new(),
        })
    }

    fn folder_root(&self, folder: &Folder) -> Result<Root, SandboxError> {
        let base = folder.path().join("root");
        make_missing(&base, None)?;
        make_dir(&base.join("run/legorl/etc"), 0o755)?;
        self.link_system(&base)?;
        let mut binds = vec![(self.path.clone(), SHARED_ETC.to_string(), false)];
        for (name, _) in self.system.iter().filter(|(_, link)| link.is_none()) {
            binds.push((Path::new("/").join(name), format!("/{name}"), false));
        }
        let mut linked = Vec::new();
        for name in ETC {
            // One link for all that is below a folder such as `ssl`.
            let top = name.split('/').next().unwrap_or(name);
            if !linked.contains(&top) && fs::symlink_metadata(self.path.join(top)).is_ok() {
                link(&Path::new(SHARED_ETC).join(top), &base.join("etc").join(top))?;
                linked.push(top);
            }
        }
        Ok(Root {
            base,
            read_only: false,
            binds,
            overlay: false,
            carried: Vec::new(),
            mounts: Vec::new(),
        })
    }

    fn link_system(&self, root: &Path) -> Result<(), SandboxError> {
        for (name, target) in &self.system {
            if let Some(target) = target {
                link(target, &root.join(name))?;
            }
        }
        Ok(())
    }
}

/// The system folders of this machine, `/etc/alternatives` among them: bound, or links as
/// `/bin -> usr/bin`.
fn system_folders() -> Result<Vec<(String, Option<PathBuf>)>, SandboxError> {
    let mut found = Vec::new();
    for name in SYSTEM {
        let host = Path::new("/").join(name);
        match fs::symlink_metadata(&host) {
            Ok(meta) if meta.is_symlink() => {
                let target = fs::read_link(&host).map_err(|e| SandboxError::io("read", &host, e))?;
                found.push((name.to_string(), Some(target)));
            }
            Ok(_) => found.push((name.to_string(), None)),
            Err(_) => {}
        }
    }
    if Path::new("/").join(ALTERNATIVES).is_dir() {
        found.push((ALTERNATIVES.to_string(), None));
    }
    Ok(found)
}

fn link(target: &Path, path: &Path) -> Result<(), SandboxError> {
    symlink(target, path).map_err(|e| SandboxError::io("create the link", path, e))
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
fn copy_etc(to: &Path) -> Result<(), SandboxError> {
    make_dir(to, 0o755)?;
    for name in ETC {
        let target = to.join(name);
        if let Some(parent) = target.parent() {
            make_dir(parent, 0o755)?;
        }
        copy_readable(&Path::new("/etc").join(name), &target)?;
    }
    // Folders of this machine that turned out to be empty would hide nothing but the fact.
    for name in [
        "ssl/certs",
        "ssl",
        "pki/ca-trust/extracted",
        "pki/ca-trust",
        "pki/tls",
        "pki",
    ] {
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
