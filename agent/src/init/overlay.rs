//! Makes a writable overlay over a read-only tree the root of the sandbox.
//!
//! The host binds the tree at `/lower` and gives this process CAP_SYS_ADMIN over the sandbox's own user
//! namespace. Here a mount namespace of that user namespace is made, the overlay mounted at `/new` with
//! its upper side in `/layer`, what the host bound is carried over, `/new` becomes the root, and the
//! capability is given up for good before any command runs.

use std::ffi::{CStr, CString};
use std::io;
use std::path::Path;

const CAP_SETPCAP: libc::c_ulong = 8;
const CAP_SYS_ADMIN: libc::c_ulong = 21;

/// Changes the root and binds what is `carried`, and the `mounts` (from, to), into it; an error says which
/// step failed.
pub fn enter(carried: &[String], mounts: &[(String, String)]) -> io::Result<()> {
    step("unshare the mount namespace", || {
        // SAFETY: unshare with an integer argument.
        unsafe { libc::unshare(libc::CLONE_NEWNS) }
    })?;
    // `userxattr` is what an unprivileged mounter may use.
    let options = c"lowerdir=/lower,upperdir=/layer/upper,workdir=/layer/work,userxattr";
    mount(
        c"overlay",
        c"/new",
        Some(c"overlay"),
        0,
        Some(options),
        "mount an overlay",
    )?;
    let carried = carried
        .iter()
        .map(|name| (format!("/{name}"), format!("/{name}")));
    for (from, inside) in carried.chain(mounts.iter().cloned()) {
        let to = format!("/new{inside}");
        make_target(Path::new(&from), Path::new(&to))
            .map_err(|e| io::Error::new(e.kind(), format!("make a place for {inside}: {e}")))?;
        let (from, to) = (CString::new(from)?, CString::new(to)?);
        // A bind keeps the flags of its source: what the host bound read-only stays so.
        mount(&from, &to, None, libc::MS_BIND | libc::MS_REC, None, &inside)?;
    }
    std::env::set_current_dir("/new")?;
    step("change the root", || {
        // SAFETY: pivot_root with two static C strings. The old root ends up on top of the new one.
        unsafe { libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()) as i32 }
    })?;
    step("leave the old root", || {
        // SAFETY: umount2 with a static C string.
        unsafe { libc::umount2(c".".as_ptr(), libc::MNT_DETACH) }
    })?;
    std::env::set_current_dir("/")?;
    give_up_capabilities()
}

/// A bind needs a folder or file to cover.
fn make_target(from: &Path, to: &Path) -> io::Result<()> {
    if std::fs::symlink_metadata(to).is_ok() {
        return Ok(());
    }
    if from.is_dir() {
        return std::fs::create_dir_all(to);
    }
    to.parent().map_or(Ok(()), std::fs::create_dir_all)?;
    std::fs::File::create(to).map(drop)
}

fn mount(
    source: &CStr,
    target: &CStr,
    kind: Option<&CStr>,
    flags: libc::c_ulong,
    options: Option<&CStr>,
    what: &str,
) -> io::Result<()> {
    let pointer = |text: Option<&CStr>| text.map_or(std::ptr::null(), CStr::as_ptr);
    step(what, || {
        // SAFETY: all pointers are null or C strings that outlive the call.
        unsafe {
            libc::mount(
                source.as_ptr(),
                target.as_ptr(),
                pointer(kind),
                flags,
                pointer(options).cast(),
            )
        }
    })
}

fn step(what: &str, call: impl FnOnce() -> i32) -> io::Result<()> {
    if call() == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    Err(io::Error::new(error.kind(), format!("{what}: {error}")))
}

/// From the bounding set (so that no program regains them) and from this process.
fn give_up_capabilities() -> io::Result<()> {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    struct Data {
        effective: u32,
        permitted: u32,
        inheritable: u32,
    }
    // _LINUX_CAPABILITY_VERSION_3: two words of 32 capabilities each.
    let mut header = Header {
        version: 0x2008_0522,
        pid: 0,
    };
    let mut data = [Data::default(); 2];
    step("read capabilities", || {
        // SAFETY: capget fills `data`, which has the size that the version asks for.
        unsafe { libc::syscall(libc::SYS_capget, &mut header, data.as_mut_ptr()) as i32 }
    })?;
    for cap in [CAP_SYS_ADMIN, CAP_SETPCAP] {
        step("drop a capability", || {
            // SAFETY: prctl with integer arguments. The bounding set first, while SETPCAP is still held.
            unsafe { libc::prctl(libc::PR_CAPBSET_DROP, cap, 0, 0, 0) }
        })?;
        let keep = !(1u32 << cap);
        data[0].effective &= keep;
        data[0].permitted &= keep;
        data[0].inheritable &= keep;
    }
    step("drop ambient capabilities", || {
        // SAFETY: prctl with integer arguments.
        unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) }
    })?;
    step("give up capabilities", || {
        // SAFETY: capset reads `data`, which has the size that the version asks for.
        unsafe { libc::syscall(libc::SYS_capset, &mut header, data.as_ptr()) as i32 }
    })
}
