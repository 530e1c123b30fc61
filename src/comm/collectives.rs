//! Collectives on numbers in memory, over groups of ranks: what sharded tensors travel by.
//!
//! A [`Collectives`] is one rank's place in one group. An operation is started and waited for
//! separately, so that a gather may be under way while something else is computed:
//!
//! ```text
//! let next = group.all_gather(..)?;     posts what this rank has, returns at once
//! compute();
//! next.wait()?;                         has what the others posted
//! ```
//!
//! | Operation | Reads | Writes |
//! |---|---|---|
//! | all-gather | n numbers | `size` x n: those of all ranks, in their order |
//! | reduce-scatter | `size` x n numbers | n: this rank's part of the sum over ranks |
//! | all-to-all | a run of numbers for every rank | the runs of all ranks for this one, in their order |
//! | all-reduce | n numbers | n: the sum over ranks |
//!
//! n and runs may be 0. All ranks of a group start the same operations in the same order; they may wait in any
//! order.
//!
//! [`super::group`] works on memory of the host, [`super::nccl_group`] on that of GPUs. An implementation for
//! devices takes device addresses; it starts behind the work that is queued on the current stream of the calling
//! thread, and its `wait` makes that stream wait.
//!
//! What an operation is given is checked here, in [`Call`], for all implementations.

use super::CommError;
use std::ffi::c_void;

/// Type of the numbers in a piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// Bytes: moved, never summed.
    U8,
    /// 64-bit integers.
    I64,
    /// bfloat16.
    Bf16,
    /// f32.
    F32,
    /// f64.
    F64,
}

impl Element {
    /// Bytes of a number.
    pub fn size_bytes(self) -> usize {
        match self {
            Element::U8 => 1,
            Element::Bf16 => 2,
            Element::F32 => 4,
            Element::I64 | Element::F64 => 8,
        }
    }
}

/// Numbers in a row, on the host or on the device that the implementation works on.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// Of the first number. May be null when `count` is 0.
    pub address: *mut c_void,
    /// Numbers.
    pub count: usize,
    /// Their type.
    pub element: Element,
}

// SAFETY: an address is a number; whoever reads or writes there has promised that it is valid.
unsafe impl Send for Memory {}

impl Memory {
    /// The numbers of a slice of bytes.
    pub fn of_bytes(bytes: &mut [u8]) -> Self {
        Self {
            address: bytes.as_mut_ptr().cast(),
            count: bytes.len(),
            element: Element::U8,
        }
    }

    /// The numbers of a slice.
    pub fn of_f64(values: &mut [f64]) -> Self {
        Self {
            address: values.as_mut_ptr().cast(),
            count: values.len(),
            element: Element::F64,
        }
    }

    /// The numbers of a slice.
    pub fn of_i64(values: &mut [i64]) -> Self {
        Self {
            address: values.as_mut_ptr().cast(),
            count: values.len(),
            element: Element::I64,
        }
    }

    /// Bytes of all of them.
    pub(super) fn size_bytes(&self) -> usize {
        self.count * self.element.size_bytes()
    }

    /// # Safety
    /// The memory is readable, on the host, and nobody writes to it while the slice is used.
    pub(super) unsafe fn bytes<'a>(&self) -> &'a [u8] {
        if self.count == 0 {
            return &[];
        }
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.address.cast(), self.size_bytes()) }
    }

    /// # Safety
    /// The memory is writable, on the host, and nobody else uses it while the slice is used.
    pub(super) unsafe fn bytes_mut<'a>(&self) -> &'a mut [u8] {
        if self.count == 0 {
            return &mut [];
        }
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.address.cast(), self.size_bytes()) }
    }
}

/// An operation under way. One that is dropped is never completed on this rank, and leaves its memory
/// alone from then on.
pub trait Pending: Send {
    /// Returns when the result is in its place (for a device: when the current stream will wait for it).
    ///
    /// # Errors
    /// [`CommError::Deadline`] names the ranks that did not come; the group is of no use after an error.
    fn wait(self: Box<Self>) -> Result<(), CommError>;
}

/// One rank's place in a group of ranks.
///
/// # Safety of the operations
/// The memory that is read and written stays valid until the handle has been waited for or dropped, and
/// until then nobody writes to either or reads the result.
#[allow(clippy::missing_safety_doc, reason = "said once, for all operations, above")]
pub trait Collectives: Send + Sync {
    /// Ranks of the world that are in the group, in the group's order.
    fn members(&self) -> &[u32];

    /// This rank's place in the group.
    fn place(&self) -> usize;

    /// Ranks in the group.
    fn size(&self) -> usize {
        self.members().len()
    }

    /// `receive` has `size` times the numbers of `send`.
    unsafe fn all_gather(
        &self,
        phase: &str,
        send: Memory,
        receive: Memory,
    ) -> Result<Box<dyn Pending>, CommError>;

    /// `send` has `size` times the numbers of `receive`.
    unsafe fn reduce_scatter(
        &self,
        phase: &str,
        send: Memory,
        receive: Memory,
    ) -> Result<Box<dyn Pending>, CommError>;

    /// Numbers for each rank and from each rank, in the group's order. What rank a sends to rank b is what
    /// rank b expects from rank a.
    unsafe fn all_to_all(
        &self,
        phase: &str,
        send: Memory,
        send_counts: &[usize],
        receive: Memory,
        receive_counts: &[usize],
    ) -> Result<Box<dyn Pending>, CommError>;

    /// In place.
    unsafe fn all_reduce(&self, phase: &str, data: Memory) -> Result<Box<dyn Pending>, CommError>;
}

/// An operation as one rank calls it, for the checks that it must pass before anything is sent.
pub(super) struct Call<'a> {
    /// This rank of the world.
    pub rank: u32,
    /// Ranks of the group.
    pub ranks: usize,
    /// Name of the operation's phase.
    pub phase: &'a str,
}

impl Call<'_> {
    pub fn all_gather(&self, send: Memory, receive: Memory) -> Result<(), CommError> {
        self.moves("all-gather", send, receive)?;
        self.fits("all-gather", "receives", receive.count, send.count * self.ranks)
    }

    pub fn reduce_scatter(&self, send: Memory, receive: Memory) -> Result<(), CommError> {
        self.moves("reduce-scatter", send, receive)?;
        self.sums("reduce-scatter", send)?;
        self.fits("reduce-scatter", "sends", send.count, receive.count * self.ranks)
    }

    pub fn all_to_all(
        &self,
        (send, send_counts): (Memory, &[usize]),
        (receive, receive_counts): (Memory, &[usize]),
    ) -> Result<(), CommError> {
        const NAME: &str = "all-to-all";
        self.moves(NAME, send, receive)?;
        for counts in [send_counts, receive_counts] {
            if counts.len() != self.ranks {
                return self.wrong(format!(
                    "{NAME} over {} ranks has counts for {}",
                    self.ranks,
                    counts.len()
                ));
            }
        }
        self.fits(NAME, "sends", send.count, send_counts.iter().sum())?;
        self.fits(NAME, "receives", receive.count, receive_counts.iter().sum())
    }

    pub fn all_reduce(&self, data: Memory) -> Result<(), CommError> {
        self.sums("all-reduce", data)
    }

    fn moves(&self, name: &str, send: Memory, receive: Memory) -> Result<(), CommError> {
        if send.element == receive.element {
            return Ok(());
        }
        self.wrong(format!(
            "{name} of {:?} into memory of {:?}",
            send.element, receive.element
        ))
    }

    fn sums(&self, name: &str, data: Memory) -> Result<(), CommError> {
        if data.element != Element::U8 {
            return Ok(());
        }
        self.wrong(format!("{name} of bytes, which are moved and never summed"))
    }

    fn fits(&self, name: &str, what: &str, got: usize, want: usize) -> Result<(), CommError> {
        if got == want {
            return Ok(());
        }
        self.wrong(format!(
            "{name} over {} ranks {what} {got} numbers instead of {want}",
            self.ranks
        ))
    }

    fn wrong(&self, problem: String) -> Result<(), CommError> {
        Err(CommError::Call {
            rank: self.rank,
            phase: self.phase.to_owned(),
            problem,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(count: usize, element: Element) -> Memory {
        Memory {
            address: std::ptr::null_mut(),
            count,
            element,
        }
    }

    #[test]
    fn an_operation_that_does_not_fit_is_refused_by_phase_and_sizes() {
        let call = Call {
            rank: 5,
            ranks: 3,
            phase: "block 7",
        };
        let f32s = |count| memory(count, Element::F32);
        for (fits, wrong, part) in [
            (
                call.all_gather(f32s(2), f32s(6)),
                call.all_gather(f32s(2), f32s(5)),
                "receives 5 numbers instead of 6",
            ),
            (
                call.reduce_scatter(f32s(6), f32s(2)),
                call.reduce_scatter(f32s(2), f32s(6)),
                "sends 2 numbers instead of 18",
            ),
            (
                call.all_to_all((f32s(3), &[0, 3, 0]), (f32s(1), &[0, 0, 1])),
                call.all_to_all((f32s(3), &[0, 3, 0]), (f32s(1), &[0, 1])),
                "over 3 ranks has counts for 2",
            ),
            (
                call.all_gather(f32s(0), f32s(0)),
                call.all_gather(f32s(2), memory(6, Element::F64)),
                "of F32 into memory of F64",
            ),
            (
                call.all_reduce(f32s(9)),
                call.all_reduce(memory(9, Element::U8)),
                "never summed",
            ),
        ] {
            assert!(fits.is_ok());
            let text = wrong.unwrap_err().to_string();
            assert!(
                text.contains(part) && text.contains("rank 5") && text.contains("`block 7`"),
                "{text}"
            );
        }
    }
}
