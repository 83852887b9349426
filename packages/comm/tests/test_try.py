import pytest, torch, torch.distributed as dist, time, os, sys, warnings
@pytest.mark.ranks(4)
def test_ok(tmp_path):
    x=torch.ones(3)*dist.get_rank(); dist.all_reduce(x); assert x[0]==6
    print("out", dist.get_rank())
@pytest.mark.ranks(4)
@pytest.mark.parametrize("a",[1,2,3])
def test_ok2(a):
    x=torch.ones(3)*dist.get_rank(); dist.all_reduce(x); assert x[0]==6
@pytest.mark.ranks(4)
def test_bad(tmp_path):
    if dist.get_rank()==2:
        assert dist.get_rank()==3, "hm"
    dist.barrier()
@pytest.mark.ranks(4, timeout=3)
def test_hang():
    if dist.get_rank()==1: time.sleep(100)
    if dist.get_rank()==2: 
        while True: pass
@pytest.mark.ranks(4)
def test_kill():
    if dist.get_rank()==1: os.kill(os.getpid(),9)
    dist.barrier()
@pytest.mark.ranks(2)
def test_warn():
    warnings.warn("x", UserWarning)
@pytest.mark.ranks(2)
def test_skip():
    pytest.skip("no")
@pytest.mark.ranks(1)
class TestA:
    def test_m(self): assert dist.get_world_size()==1
@pytest.mark.ranks(8)
def test_ok8(tmp_path):
    x=torch.ones(3)*dist.get_rank(); dist.all_reduce(x); assert x[0]==28
