//! Read-only mounts of a sandbox: what may be mounted, and where.
//!
//! A mount is bound by bubblewrap (read-only, `nosuid`, `nodev`), under an overlay into the sandbox's own
//! layer first and from there into the new root by the first process.
//!
//! Refused, with the reason: a place that is not absolute and plain (`/a/b`), one that would cover or lie in
//! what the backend itself puts there ([`RESERVED`]), two mounts of which one lies in the other, a host path
//! that does not exist, and one that would show the task's environment or files of other sandboxes.

use crate::rollout::sandbox::{SandboxError, SandboxSpec};
use std::path::{Component, Path};

/// Places of the backend, of the verifier and of the system.
const RESERVED: [&str; 14] = [
    "/bin",
    "/dev",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/logs",
    "/proc",
    "/run/legorl",
    "/sbin",
    "/solution",
    "/sys",
    "/tests",
    "/usr",
];

/// Checks the mounts of `spec` and makes their host paths real; `state` is the backend's own folder.
pub fn resolve(spec: &mut SandboxSpec, state: &Path) -> Result<(), SandboxError> {
    let name = spec.name.clone();
    let refuse = |problem: String| SandboxError::Spec {
        name: name.clone(),
        problem,
    };
    let hidden: Vec<_> = [spec.environment.as_deref(), Some(state)]
        .into_iter()
        .flatten()
        .filter_map(|path| path.canonicalize().ok())
        .collect();
    for index in 0..spec.mounts.len() {
        let inside = spec.mounts[index].inside.clone();
        if !is_plain(&inside) {
            return Err(refuse(format!(
                "a mount at `{inside}`: the place must be an absolute path below `/`, without `.`, `..` and a `/` at its end"
            )));
        }
        if let Some(place) = RESERVED.into_iter().find(|place| overlaps(&inside, place)) {
            return Err(refuse(format!(
                "a mount at `{inside}` collides with `{place}`, which belongs to the sandbox; choose a place such as /opt/NAME"
            )));
        }
        if let Some(other) = spec.mounts[..index]
            .iter()
            .find(|other| overlaps(&inside, &other.inside))
        {
            return Err(refuse(format!(
                "a mount at `{inside}` collides with the one at `{}`",
                other.inside
            )));
        }
        let host = &mut spec.mounts[index].host;
        let real = host
            .canonicalize()
            .map_err(|e| SandboxError::io(format!("mount at `{inside}`"), &*host, e))?;
        if let Some(path) = hidden
            .iter()
            .find(|path| path.starts_with(&real) || real.starts_with(path))
        {
            return Err(refuse(format!(
                "a mount of `{}` would show `{}`, which sandboxes must not see",
                real.display(),
                path.display()
            )));
        }
        *host = real;
    }
    Ok(())
}

/// Absolute, below the root, and written in the one way in which paths can be compared as text.
fn is_plain(inside: &str) -> bool {
    let mut parts = Path::new(inside).components();
    let absolute = parts.next() == Some(Component::RootDir);
    let rest: Vec<_> = parts.collect();
    let normal = rest.iter().all(|part| matches!(part, Component::Normal(_)));
    let text: String = rest
        .iter()
        .map(|part| format!("/{}", part.as_os_str().to_string_lossy()))
        .collect();
    absolute && normal && !rest.is_empty() && text == inside && !inside.contains('\0')
}

fn overlaps(a: &str, b: &str) -> bool {
    let (a, b) = (Path::new(a), Path::new(b));
    a.starts_with(b) || b.starts_with(a)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rollout::sandbox::ReadOnlyMount;

    #[test]
    fn places_that_cannot_be_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let (state, tree) = (dir.path().join("state"), dir.path().join("tree"));
        std::fs::create_dir(&state).unwrap();
        std::fs::create_dir(&tree).unwrap();
        let check = |mounts: &[(&Path, &str)]| {
            let mut spec = SandboxSpec::new("s");
            spec.mounts = mounts
                .iter()
                .map(|(host, inside)| ReadOnlyMount {
                    host: host.to_path_buf(),
                    inside: (*inside).to_owned(),
                })
                .collect();
            resolve(&mut spec, &state).map(|()| spec)
        };
        assert!(check(&[(&tree, "/opt/a"), (&tree, "/opt/b")]).is_ok());
        for inside in ["opt/a", "/", "", "/opt/../usr", "/opt/./a", "/opt/a/", "//opt"] {
            let text = check(&[(&tree, inside)]).unwrap_err().to_string();
            assert!(text.contains("absolute path"), "{inside}: {text}");
        }
        for inside in ["/usr/lib/x", "/run", "/tests", "/proc/x", "/run/legorl/agent"] {
            let text = check(&[(&tree, inside)]).unwrap_err().to_string();
            assert!(text.contains("belongs to the sandbox"), "{inside}: {text}");
        }
        let text = check(&[(&tree, "/opt/a"), (&tree, "/opt/a/b")]).unwrap_err();
        assert!(text.to_string().contains("`/opt/a`"), "{text}");
        let text = check(&[(Path::new("/no/such/tree"), "/opt/a")]).unwrap_err();
        assert!(text.to_string().contains("/no/such/tree"), "{text}");
        for host in [state.as_path(), dir.path()] {
            let text = check(&[(host, "/opt/a")]).unwrap_err().to_string();
            assert!(text.contains("must not see"), "{text}");
        }
    }
}
