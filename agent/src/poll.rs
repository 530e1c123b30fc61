//! Waiting on file descriptors, with a deadline.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Which of `fds` can be read or have ended; all false when `deadline` passed first.
pub fn wait_readable<const N: usize>(
    fds: [Option<BorrowedFd<'_>>; N],
    deadline: Option<Instant>,
) -> io::Result<[bool; N]> {
    loop {
        let mut set = fds.map(|fd| libc::pollfd {
            // A negative descriptor is skipped by poll.
            fd: fd.map_or(-1, |fd| fd.as_raw_fd()),
            events: libc::POLLIN,
            revents: 0,
        });
        let timeout = match deadline {
            None => -1,
            // Rounded up, so that the deadline has passed when poll returns for it.
            Some(at) => (at.saturating_duration_since(Instant::now()) + Duration::from_micros(999))
                .as_millis()
                .min(i32::MAX as u128) as i32,
        };
        // SAFETY: `set` is an array of N initialised pollfd that outlives the call.
        let ready = unsafe { libc::poll(set.as_mut_ptr(), N as libc::nfds_t, timeout) };
        if ready < 0 {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            return Err(error);
        }
        return Ok(set.map(|fd| fd.revents != 0));
    }
}
